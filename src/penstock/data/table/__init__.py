"""Answers beside a table, from a script or a notebook: `penstock.LLM` and `penstock.batch`.

`llm` keeps an engine, `job` is a job that a second call continues. Both stand on `asking` (questions and
schemas) and `frames` (pandas, Polars, Arrow).
"""
