"""The application `zoo`, which many tests ask: three simulated models, their own port, an admin key.

FAST is the simulator of `tests.backend_contract`. SLOW is for tests that operate it and kill its replicas;
`Zoo.whole` waits until nothing is left of that. LATE has no replica before it is asked. Replicas import this.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from ray import serve
from tests.backend_contract import config
from tests.ports import unused
from tests.waiting import wait_until

from penstock.engine_control import PauseMode
from penstock.engines.sim.engine import SimEngine
from penstock.errors import Unsupported
from penstock.serve import LLMConfig, LLMServer, build_openai_app

APP, KEY = "zoo", "admin's own"
FAST, SLOW, LATE = "m", "slow", "late"
LIMIT_S = 60


class Operated(SimEngine):
    """Cannot pause without its cache; reads other weights for as long as a file holds it, see `hold`."""

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        await super().update_weights(source, version, mode)
        while hold(source, os.getpid()).exists():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        if clear_cache:
            raise Unsupported("Its cache stays.")
        await super().pause(mode)


def hold(weights: Path, pid: int) -> Path:
    """While this file is there, the replica in process `pid` goes on reading."""
    return weights / f"hold-{pid}"


class Observed(LLMServer):
    """A server that tells its replica's id with its process, or its state."""

    async def __init__(self, llm_config: LLMConfig, **options: Any) -> None:
        await super().__init__(llm_config, engine_cls=Operated, **options)

    async def pid(self) -> tuple[str, int]:
        return self._id, os.getpid()

    async def state(self) -> tuple[str, str]:
        return self._id, self.reconciler.actual


class Zoo:
    """url: the gateway's own port. proxied: through Serve's HTTP. What names no model is about SLOW."""

    def __init__(self, port: int, serve_url: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.proxied = f"{serve_url}/{APP}"
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        self.control = serve.get_deployment_handle("LLMControl", APP)
        self.servers = serve.get_deployment_handle(f"LLMServer:{SLOW}", APP)
        self._killed: set[str] = set()

    def post(self, operation: str, **arguments: Any) -> dict[str, Any]:
        answer = self.http.post(f"/admin/{operation}", json={"model": SLOW, **arguments})
        assert answer.status_code in (200, 502), answer.text
        return answer.json()

    def status(self) -> dict[str, Any]:
        """What control knows; nothing while it is being restarted."""
        answer = self.http.get("/admin/status")
        return answer.json().get(SLOW, {}) if answer.status_code == 200 else {}

    def states(self) -> list[str]:
        return sorted(one["actual"] for one in self.status().get("replicas", {}).values())

    def health(self) -> dict[str, int]:
        """Replicas as the gateway counts them."""
        return self.http.get("/health").json()["models"][SLOW]

    def waiting(self) -> int:
        """Requests that wait for a replica."""
        name = f'penstock_queued_requests{{model="{SLOW}"}} '
        lines = self.http.get("/metrics").text.splitlines()
        return sum(round(float(line.removeprefix(name))) for line in lines if line.startswith(name))

    def pids(self) -> dict[str, int]:
        """Processes by replicas' ids."""
        return dict(self.servers.broadcast("pid").results(timeout_s=LIMIT_S))

    def resting(self) -> list[str]:
        """Ids of replicas that take no requests now, by their own word."""
        states = self.servers.broadcast("state").results(timeout_s=LIMIT_S)
        return [one for one, state in states if state != "ready"]

    def kill(self, replica: str, pid: int) -> None:
        self._killed.add(replica)
        os.kill(pid, signal.SIGKILL)

    def whole(self) -> None:
        """Returns when two replicas take requests, none of them one that was killed."""
        wait_until(
            lambda: self.states() == ["ready"] * 2 and not self._killed & self.status()["replicas"].keys()
        )
        wait_until(lambda: self.health()["ready"] == 2)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)

    def ask(self) -> str:
        return self.client().completions.create(model=SLOW, prompt="hello there").choices[0].text

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock.cli", "ctl", *words, "--url", self.url]
        environment = os.environ | {"PENSTOCK_ADMIN_KEY": KEY}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@contextmanager
def running(serve_url: str) -> Iterator[Zoo]:
    port = unused()
    gateway = {"port": port, "admin_key": KEY, "wait_for_replica_s": 2.0}
    app = build_openai_app({"llm_configs": [_fast(), _slow(), _late()], "gateway": gateway})
    serve.run(app, name=APP, route_prefix=f"/{APP}")
    try:
        zoo = Zoo(port, serve_url)
        zoo.whole()
        yield zoo
    finally:
        serve.delete(APP)


_FREE = {"ray_actor_options": {"num_cpus": 0}}
"""Logical CPUs are left to applications that come and go."""


def _fast() -> LLMConfig:
    return config().model_copy(update={"deployment_config": {"num_replicas": 2, **_FREE}})


def _slow() -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": SLOW},
        llm_engine="sim",
        engine_kwargs={"step_base_ms": 30, "max_num_seqs": 4},
        server_cls=Observed,
        deployment_config={"num_replicas": 2, **_FREE},
    )


def _late() -> LLMConfig:
    scaling = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1, "downscale_delay_s": 3600}
    return LLMConfig(
        model_loading_config={"model_id": LATE},
        llm_engine="sim",
        deployment_config={"autoscaling_config": scaling, **_FREE},
    )
