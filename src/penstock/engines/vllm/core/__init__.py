"""vLLM's engine core: a process of its own, from its start to its end.

`launch` starts `process`, which imports vLLM (`imports`), listens on `sockets`, runs `token_buffer` and, in
a gang, `leader`; `plugin` ties every process to its owner and `failure_reason` keeps why one ended.
`kv_transfer`, `nixl_progress`, `cpu_pipeline` and `cpu_experts` serve special setups.
"""
