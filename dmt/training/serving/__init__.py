"""From a trained model to a server: `export_run`, `score`, and `ServedModel` with `make_program` for other models."""
