"""A row's request in the one form that every engine and process understands, and the task it belongs to.

Built from what the user's preprocessing returned; sent by the backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from penstock.errors import ConfigError
from penstock.transport.continuation import Made

Kind = Literal["generate", "embed", "classify", "score"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POOLING_PATHS = {"embed": "/v1/embeddings", "classify": "/classify", "score": "/score"}

ROLES = frozenset(
    {
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
        "ipython",  # Llama's tool results
        "observation",  # ChatGLM's
        "control",  # Granite's, and its documents
        "document",
    }
)
"""Roles that chat templates know, OpenAI's first."""


class RowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an OpenAI-compatible endpoint.

    body: JSON object without `model`, as it will be sent; bytes, so that no table of rows can change it.
    model: as the row names it (`base` or `base:adapter`); None for the backend's own.
    prompt: the engine prompt, pickled, which replaces the body's; only for an engine in this process.
    group: requests of one group begin alike, so that one replica should have them; 0 for none.
    made: what a replica that died had made of the answer.
    """

    path: str
    body: bytes
    model: str | None = None
    prompt: bytes | None = None
    group: int = 0
    made: Made | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What the rows of a job or pipeline ask of their model.

    model: that the backend serves, for adapters that rows name.
    alone: it serves no other, so any other name in a row is an adapter's.
    token_ids: whether to request the token ids of prompt and response.
    read_files: whether to read paths, `file://` and bucket URLs in rows; False for untrusted rows.
    own_paths: endpoints that OpenAI's batch lines may name beyond `BATCH_PATHS`.
    """

    kind: Kind = "generate"
    model: str | None = None
    alone: bool = False
    token_ids: bool = True
    read_files: bool = True
    own_paths: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"There is no task {self.kind!r}; there are {', '.join(KINDS)}.")


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Appends `fields` to the JSON object `body` without parsing it, so that nothing of it changes.

    They win over its own: parsers keep the last duplicate. A body that is not an object is returned as it is;
    the engine refuses it.
    """
    text = body.strip()
    if not (fields and text.startswith(b"{") and text.endswith(b"}")):
        return body
    rest = text[1:-1].rstrip()
    return b"{" + rest + (b"," if rest else b"") + msgspec.json.encode(fields)[1:]
