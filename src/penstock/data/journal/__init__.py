"""The outcome of each row on disk or in a bucket, so that no crash loses it.

In the order of a row: lock, segment, segment_reader, index (of a job), answer_cache (of a pipeline).
"""
