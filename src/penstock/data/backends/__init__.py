"""What answers the requests of rows.

In order: `protocol` is what a window knows of all backends; `in_process` (by a config that `engine_config`
adapts), `openai_service`, `replica_set` (each `replica` at its own listener) and `serve_deployment` (by
`serve_handle`, found by `serve_lookup`) are the backends; they share `http_client` and `limits`.
`ray_cluster` connects to Ray or starts it.
"""
