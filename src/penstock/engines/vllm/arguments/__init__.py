"""vLLM's arguments: checked without importing vLLM here, and completed by defaults.

`source` reads vLLM's source, `names` from it which arguments there are. `check` asks vLLM in a short process
(`respond`, `schema`; `refused` lists what Penstock does not accept) and `answer_cache` stores the answers.
`defaults` and `environment` apply at an engine's start.
"""
