"""Hot rows (OPER): access profiles, the choice of rows, their copies. `profile` and `choice` need no torch."""
