"""OpenAI's Files and Batches: what outlives a request. Batches run through `penstock.data`, as all jobs do.

In the order of a batch: app, service, upload, files, parameters, batches, validation, turns, runner,
replicas; records and storage are what lies on disk.
"""
