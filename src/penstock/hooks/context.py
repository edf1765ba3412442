"""What a hook can learn beside the request, if it takes a second argument."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import LLMConfig

authors_ask: ContextVar[bool] = ContextVar("authors_ask", default=False)
"""Whether the hooks' own author runs this task, as in batch: failures are shown, not hidden."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request.

    path: the endpoint, such as `/v1/chat/completions`. headers: names in lower case; no credentials.
    notes: empty at first; what the preprocessor leaves here, the postprocessor finds.
    """

    config: LLMConfig
    path: str = ""
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
