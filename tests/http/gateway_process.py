"""A gateway in a process of its own, on a port that several share, before one replica."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop
from replica_process import FORKS

from penstock.processes import lifeline


class GatewayProcess:
    """Of model m. `ready` before it is asked, `kill` at the end."""

    def __init__(self, port: int, folder: Path, replica: Any) -> None:
        """folder: in which the gateways add up their figures. replica: an address, as metadata."""
        self._hears, tells = FORKS.Pipe(duplex=False)
        told = (tells, os.getpid(), port, folder, replica)
        self._process: BaseProcess = FORKS.Process(target=_run, args=told, daemon=True)
        self._process.start()
        tells.close()  # so that its end is heard

    async def ready(self) -> GatewayProcess:
        await asyncio.to_thread(self._hears.recv)
        return self

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)


def _run(tells: Connection, owner: int, *asked: Any) -> None:
    lifeline.tie_to(owner)
    uvloop.run(_serve(tells, *asked))


async def _serve(tells: Connection, port: int, folder: Path, replica: Any) -> None:
    from served import NODE, until

    from penstock.config import GatewayConfig
    from penstock.serve.fleet.table import Table
    from penstock.serve.gateway.app import Gateway
    from penstock.serve.gateway.catalogue import ServedModel
    from penstock.serve.http.server import serve_on
    from penstock.transport.address import Address

    table, address = Table(NODE), Address.from_metadata(replica)
    gateway = Gateway(GatewayConfig(), [ServedModel("m", created=1)], table, shared_figures=folder)
    await gateway.start()
    table.set_members("m", {address.replica_id: address})
    await until(lambda: table.ready("m"))
    await serve_on(gateway, "127.0.0.1", port, group=str(folder), connections=gateway.connections)
    tells.send("ready")
    await asyncio.Event().wait()
