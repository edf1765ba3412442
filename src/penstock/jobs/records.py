"""Files and batches as they are stored, and as clients see them.

Source: OpenAI's API reference, objects `file` and `batch`. Times in seconds since 1970.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from penstock.jobs.owner import DEFAULT

INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files: uploaded input, and what a batch wrote."""

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
_HIDDEN = (
    *("output_file", "error_file", "output_expires_s", "total", "completed", "failed"),
    *("tenant", "key", "may_name"),
)
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


def now_s() -> int:
    return int(time.time())


def new_id(prefix: str) -> str:
    """Ids of later objects sort after those of earlier ones."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:12]}"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """path: of the content, below the storage's root. tenant: whose it is."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    path: str
    expires_at: int | None = None
    tenant: str = DEFAULT

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now_s()

    def public(self) -> dict[str, Any]:
        shown = msgspec.structs.asdict(self)
        del shown["path"], shown["tenant"]
        return {**shown, "object": "file", "status": "processed", "status_details": None}


class Fault(msgspec.Struct, frozen=True):
    """Why a batch failed. line: of its input, from 1; None where it is about the whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """total, completed, failed: requests. output_file, error_file: ids that its files get when it ends, so
    that ending it twice makes no second file. models: that its lines name. output_expires_s: from their
    creation. tenant, key: whose it is; "" for no key. may_name: models that its lines may name; None for all.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    output_file: str
    error_file: str
    output_expires_s: int
    metadata: dict[str, str] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: list[Fault] = []
    models: list[str] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    tenant: str = DEFAULT
    key: str = ""
    may_name: list[str] | None = None

    @property
    def ended_at(self) -> int | None:
        """None of a batch that has not ended."""
        return getattr(self, f"{self.status}_at") if self.ended else None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def to(self, status: Status, **changes: Any) -> BatchRecord:
        """The batch in another state, entered now."""
        entered: dict[str, Any] = {} if status == "validating" else {f"{status}_at": now_s()}
        return msgspec.structs.replace(self, status=status, **{**entered, **changes})

    def public(self) -> dict[str, Any]:
        shown = msgspec.to_builtins(self)
        for name in _HIDDEN:
            del shown[name]
        models = shown.pop("models")
        return {
            **shown,
            "object": "batch",
            "model": models[0] if len(models) == 1 else None,
            "errors": {"object": "list", "data": shown["errors"]} if self.errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }
