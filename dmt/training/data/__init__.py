"""Click data, from files to batches: ``dmt prepare``, a reader, and a synthetic generator.

`clicks.ClickData` opens the data that a `config.DataConfig` describes, and makes batches for training and evaluation.
From the row counts in the footers of Parquet files, each rank computes which rows it reads. TorchRec is imported only
to make a batch, DuckDB only to read raw rows and the rows of a user's function.
"""
