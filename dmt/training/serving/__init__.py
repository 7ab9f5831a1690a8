"""Predicts with trained models: `export_run` and `score` for runs, `ServedModel` and `make_program` for any model."""
