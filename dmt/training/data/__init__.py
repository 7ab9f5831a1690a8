"""Click data, from files to batches: ``dmt prepare``, the reader, a synthetic generator, and one interface to all.

`clicks.ClickData` opens the data of a configuration (`config.DataConfig`); its ``batches(...)`` train and evaluate a
model. Each rank finds its rows by arithmetic on the footers of Parquet files. TorchRec is imported only when a batch is
made, DuckDB only for raw rows.
"""
