"""The engine core process, seen from its owner: start it, configure it, wait until it is ready, stop it.

vLLM would start it only after importing everything here, and the core would then import it all again. Started
first, it imports while we do, which saves 4 s. As our child, its end is seen at once and its reason is known.
The handshake is vLLM's own for cores that the front-end did not start.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.process.child import said_by
from penstock.engines.vllm.capabilities.state import Capabilities
from penstock.engines.vllm.core import failure_reason, kv_transfer, plugin
from penstock.errors import EngineDead
from penstock.processes import tree
from penstock.request_context import Gang

_GRACE_S = 5.0
_WORKERS_S = 1.0  # they end when their core does
_LINGER_MS = 500
_OF_THE_CORE = ("adapter_layers", "continued_grammars", "continued_streams", "lasting_core", "token_groups")
"""Capabilities that the core's process itself must know."""
_MODULE = "penstock.engines.vllm.core.process"  # `benchmarks.front` puts another in its place


class Core:
    """A child process that runs, or is about to run, vLLM's engine core."""

    def __init__(self, folder: Path, gang: Gang | None) -> None:
        """Starts it. Call it in the event loop, before the imports to overlap with.

        folder: for its sockets. A replacement core gets the same folder and the same front-end.
        """
        self._gang = gang
        self._loop = asyncio.get_running_loop()
        self._folder = folder
        self._reason_file = folder / "reason"
        failure_reason.clear(self._reason_file)
        self._is_ready = False
        self._held = ExitStack()
        environment = {
            **os.environ,
            plugin.OWNER: str(os.getpid()),
            failure_reason.ENVIRONMENT: str(self._reason_file),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # as multiprocessing does for its children
        }
        command = [sys.executable, "-P", "-m", _MODULE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once it has ended."""
        self._watch = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._watch, self._on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kills it and its descendants at once."""
        tree.kill_tree(self._process)

    def address(self, name: str) -> str:
        """Of "input", where the front-end listens for the core's ready message and sends requests; of
        "output", where it receives outputs; of the "handshake".
        """
        return f"ipc://{self._folder}/{name}"

    def order(self, vllm_config: Any, executor_class: type[Any], capabilities: Capabilities) -> bytes:
        """The config to run, as `obey` takes it."""
        order = {
            "vllm_config": vllm_config,
            "executor_class": executor_class,
            "handshake_address": self.address("handshake"),
            "capabilities": [name for name in _OF_THE_CORE if capabilities.has(name)],
        }
        # vLLM adds to it while it builds the config.
        environment = {**os.environ, **kv_transfer.prepared(vllm_config, self._held)}
        return b"".join(bytes(ForkingPickler.dumps(part)) for part in (environment, order))

    def obey(self, order: bytes) -> None:
        """Sends it the config to run. Blocks until it has read it.

        Raises: EngineDead when it has ended.
        """
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(order)
        except BrokenPipeError as error:
            raise EngineDead("The engine's process has ended.") from error

    async def ready(self) -> None:
        """Completes the handshake; returns when the model is loaded.

        Raises: EngineDead when it ends before that; `ended` says why.
        """
        handshake = asyncio.ensure_future(self._handshake())
        try:
            await asyncio.wait({handshake, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not handshake.done():
                raise EngineDead("The engine's process has ended.")
            handshake.result()
            self._is_ready = True
        finally:
            handshake.cancel()
            self._held.close()

    async def _handshake(self) -> None:
        import zmq
        import zmq.asyncio

        leads: dict[str, Any] | None = None
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self.address("handshake"))
            while True:
                identity, message = await router.recv_multipart()
                said = msgspec.msgpack.decode(message)
                if said["status"] == "READY":
                    return
                if said["status"] == "HELLO":
                    await router.send_multipart([identity, await self._welcome(leads)])
                else:
                    leads = said

    async def _welcome(self, leads: dict[str, Any] | None) -> bytes:
        """Addresses of the front-end and, in a gang, of the coordinator. leads: in the first core."""
        from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses

        shared = await self._gang.share(leads) if self._gang else {"addresses": {}, "parallel_config": {}}
        addresses = EngineZmqAddresses(
            [self.address("input")], [self.address("output")], **shared["addresses"]
        )
        return msgspec.msgpack.encode(EngineHandshakeMetadata(addresses, shared["parallel_config"]))

    def announce_death(self) -> None:
        """Sends the front-end the message of a dying core on its behalf: all requests end. Blocks."""
        import zmq
        from vllm.v1.engine.core import EngineCoreProc

        with zmq.Context() as context, context.socket(zmq.PUSH) as output:
            output.setsockopt(zmq.LINGER, _LINGER_MS)
            output.connect(self.address("output"))
            output.send(EngineCoreProc.ENGINE_CORE_DEAD)

    def reason(self) -> str | None:
        """Why it ended, as it recorded; during a start also what was logged."""
        found = failure_reason.read(self._reason_file)
        if found or self._is_ready:
            return found
        return failure_reason.read(failure_reason.logged(self._reason_file))

    async def stop(self) -> None:
        """Ends it and its descendants. Idempotent."""
        if not self.ended.done():
            below = tree.descendants(self.pid)
            self._process.terminate()
            await asyncio.wait({self.ended}, timeout=_GRACE_S)
            if not self.ended.done():
                self._process.kill()
                await asyncio.wait({self.ended})
            await asyncio.to_thread(tree.end, below, _WORKERS_S, _GRACE_S)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self._held.close()
        status = self._process.wait()
        text = self.reason() or said_by(status)
        if not self.ended.done():
            self.ended.set_result(text)
