"""Access profiles, and the placement of rows by access (OPER). Pure: needs neither torch nor TorchRec."""
