"""Click data, from files to batches: ``dmt prepare``, a reader, and a synthetic generator.

`clicks.ClickData` opens the data that a `config.DataConfig` describes; its ``batches(...)`` train and evaluate a model.
Each rank computes which rows of the Parquet files it reads from the row counts in their footers. TorchRec is imported
only to make a batch, DuckDB only to read raw rows and the rows of a user's function.
"""
