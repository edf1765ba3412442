"""JSON documents by which engines describe themselves, such as their version: one for each model.

Fetched from a ready replica when they are first asked for, and kept as long as that replica is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.table import Table

log = logging.getLogger(__name__)

_WAIT_S = 10.0  # vLLM takes a second to describe its endpoints for the first time

Document = Mapping[str, Any]

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class EngineDocuments:
    """Those of all models behind one gateway."""

    def __init__(self, table: Table, links: ReplicaLinks) -> None:
        self._table = table
        self._links = links
        self._found: dict[tuple[str, str], Document] = {}

    async def get(self, model_id: str, path: str) -> Document | None:
        """What a replica of the model answers to GET `path`; None when no replica is ready, or has it."""
        ready = self._table.ready(model_id)
        for replica in ready:
            if (replica.id, path) in self._found:
                return self._found[replica.id, path]
        if not ready:
            return None
        try:
            found = _decode(await self._links.get(ready[0], path, _WAIT_S))
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("replica %s of %s has no %s: %s", ready[0].id, model_id, path, error)
            return None
        present = {replica.id for replica in self._table}
        self._found = {key: known for key, known in self._found.items() if key[0] in present}
        self._found[ready[0].id, path] = found
        return found
