"""Files, on this machine or in a bucket, and the rows in them. Knows nothing of requests and results.

In order: `paths` are files, `source` the input made of them; `readers` and `writers` know JSON lines, CSV and
Parquet.
"""
