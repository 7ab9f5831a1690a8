"""The page that ``dmt demo`` writes: two runs side by side, their towers, and what the numbers mean."""
