"""vLLM's engine core process, from its start to its end.

`launch` starts `process`, which imports vLLM (`imports`), serves `sockets`, runs `token_buffer` and, in a
gang, `leader`; `plugin` ties every process to its owner and `failure_reason` records why one ended.
`waiting_outputs` is where its messages wait for the front-end. `builtin` is the core that vLLM starts itself,
where `launch` does not fit. `kv_transfer`, `nixl_progress`, `cpu_pipeline` and `cpu_experts` serve special
setups.
"""
