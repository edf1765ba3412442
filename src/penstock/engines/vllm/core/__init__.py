"""vLLM's engine core process, from its start to its end.

`launch` starts `process`, which imports vLLM (`imports`), serves `sockets`, runs `token_buffer` and, in a
gang, `leader`; `plugin` ties every process to its owner and `failure_reason` records why one ended.
`waiting_outputs` is where its messages wait for the front-end. `kv_transfer`, `other_nodes`
and `cpu_workers` serve special setups.

Private variables: `launch` sets `plugin.OWNER` and `failure_reason.ENVIRONMENT` for processes of this
machine. The core's workers inherit them; for workers that are Ray's actors, which get a copy on any node, the
first one is `ENDED_BY_RAY`. What vLLM's config sets comes to the core with that config.
"""
