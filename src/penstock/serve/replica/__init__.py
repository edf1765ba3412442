"""A replica of a model: one engine, as Ray Serve runs it.

In order: `deployment` (binding) and its `version`, `server` (LLMServer), `environment` and `gang` (its
start), `reconciler` (follows control) and `adapter_changes`, `inbound` (what gateways reach), `single_model`
(HTTP without a router), `handles` (calls by handle), `prefill_client`, `preprocessor` and
`tensor_serialization`.
"""
