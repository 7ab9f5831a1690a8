"""The semantic-preserving tower transform (SPTT; DMT, arXiv 2403.00877, section 3.1) as TorchRec modules."""
