"""Replicas and gateways in processes of their own, without Ray: what `benchmarks.gateway` measures.

    python -m benchmarks.fleet replica '{"app": "sim", "options": {...}, "slo": null}'
    python -m benchmarks.fleet gateway '{"replicas": [...], "port": 0, "share_port": false}'

Each prints one line of JSON when it is ready, serves until it is ended, and ends with whoever started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import uvloop

from benchmarks.command import demo_model
from benchmarks.workload import MODEL_ID, ROOT, Workload

if TYPE_CHECKING:
    from penstock.engine import Engine

NODE = "bench"
_READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What a process has used so far. Units: CPU seconds; bytes now, and at most since its start."""

    cpu_s: float
    memory: int
    most_memory: int


class Child:
    """One process of `module`, which serves until it is stopped."""

    module = "benchmarks.fleet"

    def __init__(self, kind: str, **options: Any) -> None:
        command = [sys.executable, "-m", self.module, kind, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        if not (said := self.line()):
            raise RuntimeError(f"A {kind} of the benchmark did not start; its last words are above.")
        self.said: dict[str, Any] = json.loads(said)
        self.pid = self._process.pid

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def line(self) -> str:
        """The next that it prints; blocks."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def spent(self) -> Spent:
        """CPU and memory of the process."""
        times = psutil.Process(self.pid).cpu_times()
        status = Path(f"/proc/{self.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return Spent(times.user + times.system, now, most)

    def stop(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Replica(Child):
    """An app behind a replica's own listener: "sim" is the simulator, "vllm" a real vLLM on CPU, "plain" the
    least that can answer.
    """

    def __init__(self, app: str, *, slo: Mapping[str, float] | None = None, **options: Any) -> None:
        """slo: fields of `Targets`; with them batch waits for its turns, as in a replica of Serve."""
        super().__init__("replica", app=app, options=options, slo=slo)

    @property
    def port(self) -> int:
        """Of its listener, for those who ask it straight, with `headers`."""
        return self.said["port"]

    @property
    def headers(self) -> list[str]:
        return [f"x-penstock-secret: {self.said['secret']}"]


class Gateway(Child):
    """The gateway as it runs in production, on a port of its own."""

    headers: tuple[str, ...] = ()

    def __init__(self, *replicas: Replica, port: int = 0, share_port: bool = False, **config: Any) -> None:
        said = [replica.said for replica in replicas]
        super().__init__("gateway", replicas=said, port=port, share_port=share_port, config=config)

    @property
    def port(self) -> int:
        return self.said["port"]


async def _serve_replica(app: str, options: dict[str, Any], slo: dict[str, float] | None) -> dict[str, Any]:
    from benchmarks.plain import Plain
    from penstock.engine import Load
    from penstock.serve.replica.inbound.listener import Listener
    from penstock.serve.replica.inbound.status_link import StatusSource
    from penstock.serve.replica.tiers.controller import Targets
    from penstock.serve.replica.tiers.layer import ByClass, Turns
    from penstock.serve.replica.tiers.share import BatchShare
    from penstock.transport import link

    load: Any = Load
    if app == "plain":
        asgi = Plain(**options)
    else:
        engine = _engine(app, options)
        await engine.start()
        _kept.append(engine)
        asgi, load = engine.app(), engine.load
    share = None
    if slo is not None:
        share = BatchShare(load, Targets(**slo), time.monotonic)
        asgi = ByClass(asgi, Turns(share))
    hello = link.Hello(MODEL_ID, 8)
    facts = StatusSource(load=load, hello=lambda: hello, batch=share, version=app)
    listener = await Listener.open(asgi, facts, node_id=NODE, node_host="127.0.0.1")
    await listener.sockets.listen_on_network()
    _kept.append(listener)
    return listener.address.to_metadata()


def _engine(app: str, options: dict[str, Any]) -> Engine:
    from penstock.config import LLMConfig
    from penstock.engines import engine_class

    source = None
    if app == "vllm":
        source = str(demo_model())
        options = Workload(demo_model(), "uni").engine_kwargs() | options
    config = LLMConfig.model_validate(
        {
            "model_loading_config": {"model_id": MODEL_ID, "model_source": source},
            "llm_engine": app if app == "sim" else "vLLM",
            "accelerator_config": {"kind": "cpu"} if app == "vllm" else None,
            "engine_kwargs": options,
        }
    )
    return engine_class(config)(config)


async def _serve_gateway(
    replicas: list[dict[str, Any]], port: int, share_port: bool, config: dict[str, Any]
) -> dict[str, Any]:
    from penstock.config import GatewayConfig
    from penstock.serve.fleet.table import Table
    from penstock.serve.gateway.app import Gateway
    from penstock.serve.gateway.catalogue import ServedModel
    from penstock.serve.http.server import serve_on
    from penstock.transport.address import Address

    table = Table(NODE)
    gateway = Gateway(GatewayConfig(**config), [ServedModel(MODEL_ID, 1, max_ongoing_requests=10**6)], table)
    await gateway.start()
    addresses = [Address.from_metadata(replica) for replica in replicas]
    table.set_members(MODEL_ID, {address.replica_id: address for address in addresses})
    async with asyncio.timeout(_READY_S):
        while len(table.ready(MODEL_ID)) < len(addresses):  # noqa: ASYNC110 - links tell within milliseconds
            await asyncio.sleep(0.01)
    group = "bench" if share_port else None
    public = await serve_on(gateway, "127.0.0.1", port, group=group)
    _kept.extend((gateway, public))
    return {"port": public.number}


_kept: list[object] = []
_KINDS = {"replica": _serve_replica, "gateway": _serve_gateway}


async def _main(kind: str, options: dict[str, Any]) -> None:
    from penstock.processes import lifeline

    lifeline.tie_to(os.getppid())
    print(json.dumps(await _KINDS[kind](**options)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], json.loads(sys.argv[2])))
