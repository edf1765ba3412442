"""Engine arguments that are set elsewhere in Penstock, each with the sentence that says where.

They are `vllm serve`'s own names; an argument here is refused in `engine_kwargs` and as a flag.
"""

from __future__ import annotations

_LISTENER = "has no effect: vLLM's application runs behind Penstock's own listener. Leave it out."
_LAUNCHER = "belongs to vLLM's own launcher, which Penstock replaces. Leave it out."
_GANG = (
    "is set for each replica of a gang: give data_parallel_size alone, and each of its engines is a replica."
)
_TLS = "is the gateway's: set `gateway.tls`, or --tls-cert and --tls-key of `penstock serve`."
_ALL_HEADERS = (
    "is not supported: `gateway.cors` allows all methods and headers that requests need. Leave it out."
)
_OF_CLIENTS = "is not supported: let a proxy in front of the gateway ask clients for certificates."
_CORS = "is the gateway's: set `gateway.cors`."

REFUSED: dict[str, str] = {
    "model": "is set by `model_loading_config.model_source`.",
    "tokenizer": "is set by `model_loading_config.tokenizer_source`.",
    "served_model_name": "is set by `model_loading_config.model_id`.",
    "host": "is the gateway's: set `gateway.host`, or --host of `penstock serve`.",
    "port": "is the gateway's: set `gateway.port`, or --port of `penstock serve`.",
    "api_key": "is the gateway's: set `gateway.api_key`, or PENSTOCK_API_KEY.",
    "root_path": "is not supported: let the proxy in front remove the path.",
    "uds": _LISTENER,
    "uvicorn_log_level": _LISTENER,
    "disable_uvicorn_access_log": _LISTENER,
    "disable_access_log_for_endpoints": _LISTENER,
    "h11_max_incomplete_event_size": _LISTENER,
    "h11_max_header_count": _LISTENER,
    "grpc": _LAUNCHER,
    "grpc_port": _LAUNCHER,
    "headless": _LAUNCHER,
    "api_server_count": _LAUNCHER,
    "data_parallel_supervisor_port": _LAUNCHER,
    "dp_supervisor_probe_interval_s": _LAUNCHER,
    "dp_supervisor_probe_timeout_s": _LAUNCHER,
    "dp_supervisor_probe_failure_threshold": _LAUNCHER,
    "data_parallel_rank": _GANG,
    "data_parallel_start_rank": _GANG,
    "data_parallel_size_local": _GANG,
    "data_parallel_address": _GANG,
    "data_parallel_rpc_port": _GANG,
    "data_parallel_backend": _GANG,
    "data_parallel_hybrid_lb": _GANG,
    "data_parallel_external_lb": _GANG,
    "data_parallel_multi_port_external_lb": _GANG,
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ca_certs": _OF_CLIENTS,
    "ssl_cert_reqs": _OF_CLIENTS,
    "ssl_ciphers": "is not supported: the gateway takes OpenSSL's own. Leave it out.",
    "enable_ssl_refresh": "has no effect: the gateway reads changed certificates by itself. Leave it out.",
    "allow_credentials": _CORS,
    "allowed_origins": _CORS,
    "allowed_methods": _ALL_HEADERS,
    "allowed_headers": _ALL_HEADERS,
}
