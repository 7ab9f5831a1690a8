"""Inside a tower: 4D sharding (Neo, arXiv 2104.05158), its costs and planner, and optimizers of the tables."""
