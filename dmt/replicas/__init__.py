"""Averages replicas of the tables (2D sparse parallelism, Algorithm 1) and gradients of the dense part."""
