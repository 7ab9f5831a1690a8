"""Keeps copies equal: replicas of the tables (2D sparse parallelism), and gradients of the dense part."""
