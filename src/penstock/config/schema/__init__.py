"""What users may write: pydantic models, strict and frozen.

`strict` (base classes), `env_vars`, `settings` (the environment), then `model` with its parts `sections`,
`routing`, `processing`, `prefill`, `deployment`; `gateway` beside it.
"""
