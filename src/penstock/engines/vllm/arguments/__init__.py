"""vLLM's arguments: checked without importing vLLM here, and completed by defaults.

`check` asks vLLM in a short process (`question`, `respond`, `schema`, `flags`; `refused` says what Penstock
does not take) and `answer_cache` keeps what it says. `defaults`, `lora` and `environment` apply at an
engine's start.
"""
