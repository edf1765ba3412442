"""Extracts from a request the features that its model's routing policy reads, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.serve.fleet.table import Table
from penstock.serve.gateway.body import Fields
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.routing.policy import Policy, RoutingRequest
from penstock.serve.routing.prefix_hashes import HASHED_BYTES, blocks, home
from penstock.transport.link import BYTES_PER_TOKEN

_MOST_KEY = 512  # bytes of a session's name
_EMPTY = (b"", b"null", b'""', b"[]")


class FeatureReader:
    """For one model. With a single replica that does not scale, nothing is read."""

    def __init__(self, model: ServedModel, policy: Policy, table: Table) -> None:
        reads = getattr(policy, "reads", ())
        self._model = model
        self._table = table
        self._prompt = "prompt" in reads
        self._session = "session" in reads
        self._header = model.session_header.encode()

    def read(
        self, adapter: str, fields: Fields, headers: Sequence[tuple[bytes, bytes]], size: int
    ) -> RoutingRequest:
        """size: of the body, in bytes."""
        longest = self._table.max_model_len(self._model.id)
        tokens = size // BYTES_PER_TOKEN
        if longest is not None and tokens > longest:
            tokens = longest  # an image, or a request that the engine will refuse
        is_read = (self._prompt or self._session) and (
            self._model.scales or len(self._table.members(self._model.id)) > 1
        )
        session = session_of(fields, headers, self._header) if is_read and self._session else ""
        if not (is_read and self._prompt):
            return RoutingRequest(adapter, session, tokens)
        prompt = prompt_of(fields)
        seed = adapter + _text(fields.cache_salt)
        return RoutingRequest(adapter, session, tokens, blocks(prompt, seed), home(prompt, seed))


def prompt_of(fields: Fields) -> bytes:
    """The start of the prompt as JSON, in the order of chat templates.

    Of chat: tools, system prompt and messages, with whatever content they have; an image counts by its URL or
    its data. Of completions, the text or the token ids.
    """
    pieces: list[memoryview] = []
    left = HASHED_BYTES
    for raw in (
        fields.tools,
        fields.system,
        fields.instructions,
        fields.messages,
        fields.prompt,
        fields.prompt_token_ids,
        fields.input,
    ):
        piece = memoryview(raw)[:left]
        if len(piece) > 4 or bytes(piece) not in _EMPTY:
            pieces.append(piece)
            left -= len(piece)
    return b"".join(pieces)


def session_of(fields: Fields, headers: Sequence[tuple[bytes, bytes]], header: bytes) -> str:
    """What keeps a request with others of its session; "" for nothing."""
    for name, value in headers:
        if name == header and value:
            return value[:_MOST_KEY].decode("latin-1")
    return _text(fields.prompt_cache_key) or _text(fields.user)


def sticky_key(
    model: ServedModel, fields: Fields, headers: Sequence[tuple[bytes, bytes]] = (), key: str = ""
) -> str:
    """What keeps a request with one version of its model; "" for nothing. key: the name of its API key, which
    stands for a user that it does not name.
    """
    sticky = model.version.sticky if model.version is not None else "none"
    if sticky == "session":
        return session_of(fields, headers, model.session_header.encode())
    return _text(fields.user) or key if sticky == "user" else ""


def _text(raw: msgspec.Raw) -> str:
    """A JSON value as a key; empty values give none."""
    piece = bytes(memoryview(raw)[:_MOST_KEY])
    return "" if piece in _EMPTY else piece.decode(errors="replace")
