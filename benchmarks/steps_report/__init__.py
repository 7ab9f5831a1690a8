"""From the record of `benchmarks/train_step.py` to tables, goals, pictures."""
