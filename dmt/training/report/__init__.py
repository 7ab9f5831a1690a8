"""The page that ``dmt demo`` leaves behind: two runs side by side, their towers, and what the numbers mean."""
