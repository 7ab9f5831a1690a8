"""Across towers: the semantic-preserving tower transform (DMT, arXiv 2403.00877, section 3.1) as TorchRec modules."""
