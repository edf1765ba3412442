"""The adapters of each model, as listed by one of its replicas; the gateway reads no storage itself.

Replicas have the path and the credentials. Both cache the list for some seconds, and the gateway shows the
last known list when no replica can answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.catalogue import ServedModel
from penstock.transport import link

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""How long a list is reused."""

_WAIT_S = 3.0  # for an answer; after that the last known list is shown
_ASK_S = 60.0  # a store of thousands of adapters may need that long, once

_decode = msgspec.json.Decoder(tuple[str, ...]).decode


@dataclass(slots=True)
class _Known:
    names: tuple[str, ...] = ()
    until: float = 0.0
    asking: asyncio.Task[None] | None = None


class Listing:
    """Lists of all models behind one gateway."""

    def __init__(self, models: Sequence[ServedModel], table: Table, links: ReplicaLinks) -> None:
        self._known = {model.id: _Known() for model in models if model.adapter_slots}
        self._table = table
        self._links = links

    async def adapters(self, model_id: str) -> Sequence[str]:
        """Names, sorted; none for a model that takes no adapters."""
        known = self._known.get(model_id)
        if known is None:
            return ()
        ready = self._table.ready(model_id)
        if ready and asyncio.get_running_loop().time() >= known.until:
            if known.asking is None:
                known.asking = asyncio.create_task(self._ask(random.choice(ready), known))
            await asyncio.wait([known.asking], timeout=_WAIT_S)
        return known.names

    async def all(self) -> Mapping[str, Sequence[str]]:
        """By model; all are queried at the same time."""
        names = await asyncio.gather(*map(self.adapters, self._known))
        return dict(zip(self._known, names, strict=True))

    async def close(self) -> None:
        """Cancels open queries."""
        asking = [known.asking for known in self._known.values() if known.asking]
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _ask(self, replica: Replica, known: _Known) -> None:
        try:
            known.names = _decode(await self._links.get(replica, link.ADAPTERS_PATH, _ASK_S))
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("The adapters of model '%s' cannot be listed now: %s", replica.model_id, error)
        finally:
            known.until = asyncio.get_running_loop().time() + FRESH_S
            known.asking = None
