"""What the first core of a gang runs for all: vLLM's coordinator, and the store where they agree on ports.

vLLM's own launcher runs the coordinator as a process and keeps the store itself. Here both are threads of the
first core: idle while it computes, they end with it, as the gang does. Importing this file imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import msgspec
import zmq
from vllm.distributed.utils import create_tcp_store
from vllm.utils.network_utils import get_tcp_uri
from vllm.v1.engine.coordinator import DPCoordinatorProc

LEADS = "LEADS"
"""The status of its message, in addition to those of vLLM's handshake."""

_FROM_THE_FIRST = (
    "data_parallel_master_ip",
    "data_parallel_master_port",
    "_data_parallel_master_port_list",
    "_coord_store_port",
)
"""What all cores of a gang copy from the first one's configuration, as in vLLM's own handshake."""


def lead(vllm_config: Any, handshake_address: str) -> Any:
    """Starts both and sends their addresses to this core's owner. Returns the store; keep it while cores may
    start.
    """
    parallel = vllm_config.parallel_config
    host = parallel.data_parallel_master_ip
    store = create_tcp_store(host, 0, is_master=True, world_size=-1, wait_for_workers=False)
    parallel._coord_store_port = store.port
    fronts, outputs, inputs = _coordinate(parallel.data_parallel_size, host)
    message = {
        "status": LEADS,
        "addresses": {
            "coordinator_input": inputs,
            "coordinator_output": outputs,
            "frontend_stats_publish_address": fronts,
        },
        "parallel_config": {name: getattr(parallel, name) for name in _FROM_THE_FIRST},
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as owner:
        owner.connect(handshake_address)
        owner.send(msgspec.msgpack.encode(message))
    return store


def _coordinate(size: int, host: str) -> tuple[str, str, str]:
    """Starts the coordinator; where it publishes to front-ends, listens to cores, and publishes to cores."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    anywhere = get_tcp_uri(host, 0)
    threading.Thread(
        target=DPCoordinatorProc.run_coordinator,
        args=(size, anywhere, anywhere, anywhere, sender),
        name="coordinator",
        daemon=True,
    ).start()
    with receiver:
        return receiver.recv()
