"""What these tests stand on: real listeners around simulated engines, a real gateway, real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import replica_process
from tests.waiting import until

from penstock.asgi import ASGIApp
from penstock.config import GatewayConfig, LLMConfig
from penstock.engine import Load
from penstock.engines.sim.engine import SimEngine
from penstock.layers.adapters import Layer, Source, Store
from penstock.layers.generation import Generation
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.admission import AdmissionQueue
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http.server import Port, serve_on
from penstock.serve.http.tls import Certificate
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.serve.replica.tiers.controller import Targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.transport import link
from penstock.transport.address import Address

NODE = "this-node"


def sim_config(
    model_id: str, lora: dict[str, Any] | None = None, aliases: Sequence[str] = (), **options: Any
) -> LLMConfig:
    return LLMConfig(
        aliases=[*aliases],
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        engine_kwargs=options,
        lora_config=lora,
    )


class Replica:
    """A simulated engine behind its own listener, on this loop; with `lora` it takes adapters."""

    def __init__(self, engine: SimEngine, listener: Listener, adapters: Store | None) -> None:
        self.engine = engine
        self.share: BatchShare
        self.listener = listener
        self.adapters = adapters

    @property
    def address(self) -> Address:
        return self.listener.address

    @classmethod
    async def start(
        cls,
        model_id: str,
        *,
        node_id: str = NODE,
        network: bool = False,
        version: str = "v",
        **options: Any,
    ) -> Replica:
        config = sim_config(model_id, **options)
        engine, adapters = SimEngine(config), None
        await engine.start()
        app: ASGIApp = Generation(engine.app(), engine)
        turns = Turns(BatchShare(engine.load, Targets(), time.monotonic))
        if config.lora_config is not None:
            adapters = Store(engine, Source(config), lambda: listener.links.notify())
            app = Layer(app, adapters)
        app = ByClass(app, turns, engine.weights_version)
        listener = await Listener.open(
            app,
            StatusSource(
                load=engine.load,
                hello=lambda: link.Hello(model_id, engine.max_model_len(), engine.kv_tokens()),
                adapters=adapters,
                batch=turns.share,
                add_aliases=config.add_aliases,
                weights=engine.weights_version,
                version=version,
            ),
            node_id=node_id,
            node_host="127.0.0.1",
            wait_dead=engine.wait_dead,
        )
        if network:
            await listener.sockets.listen_on_network()
        if adapters is not None:
            await adapters.start()
        replica = cls(engine, listener, adapters)
        replica.share = turns.share
        return replica

    async def stop(self) -> None:
        await self.listener.close()
        if self.adapters is not None:
            await self.adapters.stop()
        await self.engine.stop()


class Slots:
    """A replica's adapters, put there by hand. asked: how often they were listed."""

    def __init__(self, *loaded: str) -> None:
        self.names = set(loaded)
        self.asked = 0
        self.error: Exception | None = None

    def loaded(self) -> Iterable[str]:
        return self.names

    async def listed(self) -> Sequence[str]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return sorted(self.names)


class ReplicaProcess:
    """The same in a process of its own, to be killed."""

    def __init__(self, model_id: str, **options: Any) -> None:
        self.process, self._told = replica_process.start(model_id, options)

    async def ready(self) -> ReplicaProcess:
        self.address = Address.from_metadata(await asyncio.to_thread(self._told.recv))
        return self

    def kill(self) -> None:
        self.process.kill()

    async def stop(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join)


class Deployment:
    """What Serve says of a deployment: the addresses of its `members`, after a pause."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.members: list[Any] = []
        self.handle: Any = self
        self._pause_s = pause_s

    def broadcast(self, method: str, node_id: str) -> Deployment:
        return self

    async def results_async(self, **_: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(self._pause_s)
        return [one.address.to_metadata() for one in self.members]

    def options(self, **_: Any) -> Deployment:
        return self

    def remote(self, node_id: str) -> Any:
        return SimpleNamespace(cancel=bool)

    async def check(self) -> None:
        await asyncio.sleep(self._pause_s)


class Served:
    """One gateway with its table, port and replicas. Made by the `served` fixture."""

    def __init__(self) -> None:
        self.table = Table(NODE)
        self.members: dict[str, dict[str, Address]] = {}
        self._stops: list[Callable[[], Awaitable[None]]] = []
        self.port: Port | None = None

    def add(self, model_id: str, *addresses: Address) -> None:
        """Tells the table of members, as Serve would."""
        known = self.members.setdefault(model_id, {})
        known.update({address.replica_id: address for address in addresses})
        self.table.set_members(model_id, known)

    def remove(self, model_id: str, address: Address) -> None:
        del self.members[model_id][address.replica_id]
        self.table.set_members(model_id, self.members[model_id])

    async def replica(self, model_id: str = "m", *, join: bool = True, **options: Any) -> Replica:
        replica = await Replica.start(model_id, **options)
        self._stops.append(replica.stop)
        if join:
            self.add(model_id, replica.address)
            await self.until_ready(model_id, replica.address)
        return replica

    async def process(self, model_id: str = "m", *, join: bool = True, **options: Any) -> ReplicaProcess:
        replica = await ReplicaProcess(model_id, **options).ready()
        self._stops.append(replica.stop)
        if join:
            self.add(model_id, replica.address)
            await self.until_ready(model_id, replica.address)
        return replica

    async def app(
        self,
        app: ASGIApp,
        model_id: str = "m",
        load: Callable[[], Load] = Load,
        adapters: Any | None = None,
        state: Callable[[], link.State] = lambda: "ready",
        **more: Any,
    ) -> Listener:
        """Any ASGI app as a replica, where the simulator does not do what is needed."""
        facts = StatusSource(
            **{
                "load": load,
                "hello": lambda: link.Hello(model_id, 8),
                "adapters": adapters,
                "state": state,
                **more,
            }
        )
        listener = await Listener.open(app, facts, node_id=NODE, node_host=None)
        self._stops.append(listener.close)
        self.add(model_id, listener.address)
        if self.port is not None:
            await self.until_ready(model_id, listener.address)
        return listener

    async def gateway(self, *cards: ServedModel | str, **config: Any) -> Gateway:
        models = [ServedModel(card, created=1) if isinstance(card, str) else card for card in cards]
        own = {name: config.pop(name, None) for name in ("unreachable", "operate", "jobs", "settle")}
        gateway = Gateway(GatewayConfig(**config), models, self.table, **own)
        self._gateway = gateway
        await gateway.start()
        self._stops.append(gateway.close)
        tls = gateway._config.tls
        certificate = Certificate(tls.cert, tls.key) if tls else None
        self.port = await serve_on(
            gateway, "127.0.0.1", 0, connections=gateway.connections, certificate=certificate
        )
        self._stops.append(lambda: self.port.close(grace_s=0.2))
        return gateway

    def line(self, model_id: str) -> AdmissionQueue:
        """Where requests of the model wait."""
        return self._gateway._dispatch._served[model_id].queue

    @property
    def url(self) -> str:
        assert self.port is not None
        return f"http{'s' if self._gateway._config.tls else ''}://127.0.0.1:{self.port.number}"

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, verify=False, **options)

    def openai(self, api_key: str = "fake-key") -> openai.AsyncOpenAI:
        url, http = f"{self.url}/v1", self.http()
        return openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0, http_client=http)

    async def until_ready(self, model_id: str, address: Address) -> None:
        if self.port is not None:
            await until(lambda: address.replica_id in {r.id for r in self.table.ready(model_id)})

    async def close(self) -> None:
        await asyncio.gather(*(stop() for stop in self._stops))


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}
