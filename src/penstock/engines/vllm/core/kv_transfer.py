"""Prepares an engine for KV cache transfer, as sender or receiver: a unique engine id and a port."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from penstock.engine import HOST
from penstock.engines.vllm.core import plugin
from penstock.errors import EngineStartFailed

_CHANNEL_HOST, _CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_UNRELEASED = "UCX_RCACHE_MAX_UNRELEASED"


def check(vllm_config: Any) -> None:
    """Raises: EngineStartFailed when a package that the connector needs is not installed."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and _uses_nixl(transfer) and find_spec("nixl") is None:
        raise EngineStartFailed(
            "Its KV cache is moved by NIXL, which is missing: pip install 'penstock[nixl]'."
        )


def prepared(vllm_config: Any, held: ExitStack) -> dict[str, str]:
    """Environment variables for a core that is about to start. The user's own values win.

    held: until the core is ready, so that no other process takes its port.

    Each core gets its own engine id, a replacement too: peers cache an engine's memory layout for ever.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return {}
    transfer.engine_id = uuid.uuid4().hex
    port = _free_port(held) - vllm_config.parallel_config.data_parallel_index  # which NIXL adds
    ours = {_CHANNEL_HOST: os.environ.get(HOST, "localhost"), _CHANNEL_PORT: str(port)}
    if vllm_config.device_config.device_type == "cpu" and _uses_nixl(transfer):
        # vLLM sets the second unless NIXL is already imported.
        ours |= {plugin.NIXL_RESTS: "1", _UNRELEASED: "1024"}
    return {name: value for name, value in ours.items() if name not in os.environ}


def _uses_nixl(transfer: Any) -> bool:
    return "Nixl" in str(transfer.kv_connector)


def _free_port(held: ExitStack) -> int:
    """A port held for a process that binds it with SO_REUSEADDR, as ZeroMQ does; others find it taken."""
    holder = held.enter_context(socket.socket())
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder.getsockname()[1]
