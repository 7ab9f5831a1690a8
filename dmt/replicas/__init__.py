"""Between copies: replicas of the tables (2D sparse parallelism) and the gradients of the dense part."""
