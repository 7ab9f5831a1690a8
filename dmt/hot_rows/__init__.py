"""Access profiles, placement of rows by access, and hot rows (OPER). Only `runtime` needs torch and TorchRec."""
