"""Where a replica's own listener is found: written by the replica, published by Serve, read by gateways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KEEP_ALIVE_S = 75
"""Seconds that a listener keeps a connection open between two requests."""


@dataclass(frozen=True, slots=True)
class Address:
    """One replica's listener, as published in Serve's replica metadata.

    `unix` is an abstract Unix socket, for gateways on the same node: it starts with a NUL and has no file.
    `host` and `port` are the node's: for gateways on other nodes; None when no network is used.
    `secret` is drawn by the replica and sent with every request to it. It is never logged.
    """

    replica_id: str
    node_id: str
    unix: str | None
    host: str | None
    port: int | None
    secret: str = field(repr=False)

    def to_metadata(self) -> dict[str, str | int | None]:
        """Plain values, as Serve's metadata wants them."""
        return asdict(self)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Address:
        """Foreign keys are ignored: a class derived from ours may publish more."""
        return cls(**{name: metadata[name] for name in cls.__slots__})

    def is_local(self, node_id: str) -> bool:
        """Whether a gateway on `node_id` can use the Unix socket."""
        return self.unix is not None and self.node_id == node_id
