"""The port that a core is told for its side channel stays free for it until it is ready."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.engines.vllm.core import kv_transfer

RANK = 3
"""In a gang; NIXL adds it to the port."""


@pytest.fixture
def moves_its_cache() -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector", engine_id=""),
        device_config=SimpleNamespace(device_type="gpu"),
        parallel_config=SimpleNamespace(data_parallel_index=RANK),
    )


def test_nobody_else_gets_the_port_and_the_core_does(moves_its_cache: Any):
    with ExitStack() as held:
        port = int(kv_transfer.prepared(moves_its_cache, held)["VLLM_NIXL_SIDE_CHANNEL_PORT"]) + RANK
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as door:
            door.bind(f"tcp://127.0.0.1:{port}")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
