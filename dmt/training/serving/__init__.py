"""From a trained model to a server: `export_run`, `score`, `ServedModel` and `make_program` for one's own."""
