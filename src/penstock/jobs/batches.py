"""The Batches API's store: every batch and its state, in memory and on disk.

A state is on disk before a client sees it. Used on the event loop of its service, which alone writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import msgspec

from penstock.config.schema.jobs import JobsConfig
from penstock.errors import BadRequest, Conflict, Error, NotFound, TooLarge
from penstock.jobs.files import FileStore
from penstock.jobs.owner import Owner, is_for
from penstock.jobs.parameters import KEEP_S, Page, expires_after_s, shown, window_s
from penstock.jobs.records import INPUT, BatchRecord, new_id, now_s
from penstock.jobs.storage import JobStorage
from penstock.jobs.validation import ENDPOINTS
from penstock.on_thread import completed
from penstock.openai.errors import unreadable

FOLDER = "batches"
JOURNAL = "output.jsonl.journal"
_MOST_LISTED, _LISTED = 100, 20
_METADATA, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512


class Expiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Expiry | None = None


_parsed = msgspec.json.Decoder(CreateBatch).decode


class BatchStore:
    """progress: requests that are completed and failed, of batches that have more of them than is stored."""

    def __init__(
        self,
        config: JobsConfig,
        storage: JobStorage,
        files: FileStore,
        own_endpoints: Callable[[], Collection[str]],
    ) -> None:
        """own_endpoints: of users' server classes, which batches may ask, too."""
        self._config, self._storage, self._files = config, storage, files
        self._own_endpoints = own_endpoints
        self._records: dict[str, BatchRecord] = {}
        self._creating: list[BatchRecord] = []
        self._writing = asyncio.Lock()
        files.reader_of = self._reader_of
        self.progress: dict[str, tuple[int, int]] = {}

    def load(self) -> None:
        """Reads all records; removes files without one, and journals that are in a batch's files. Blocks."""
        found = self._storage.read_all(FOLDER, BatchRecord)
        self._records = {batch_id: one for batch_id, one in found.items() if one is not None}
        self.progress = {}
        names = [file.name.split("/") for file in (self._storage.root / FOLDER).files() if "/" in file.name]
        for batch_id in {name[0] for name in names} - found.keys():
            self._storage.remove_tree(f"{FOLDER}/{batch_id}")
        for batch_id in {name[0] for name in names if name[1] == JOURNAL} & self._records.keys():
            if self._records[batch_id].ended and not self._records[batch_id].errors:
                self._storage.remove_tree(f"{FOLDER}/{batch_id}/{JOURNAL}")

    def unfinished(self) -> list[BatchRecord]:
        return [one for one in self._records.values() if not one.ended]

    def _reader_of(self, file_id: str) -> str | None:
        """The unfinished batch that reads a file, if there is one."""
        unfinished = [*self._creating, *self.unfinished()]
        return next((one.id for one in unfinished if one.input_file_id == file_id), None)

    def get(self, batch_id: str, owner: Owner | None = None) -> BatchRecord:
        """Raises: NotFound, also for a batch of another tenant than `owner`'s."""
        if (record := self._records.get(batch_id)) is None or not is_for(owner, record.tenant):
            raise NotFound(f"There is no batch '{batch_id[:80]}'.")
        return record

    async def shown(self, record: BatchRecord) -> dict[str, Any]:
        """As clients see it. Its progress is stored before, so that no restart takes counts back."""
        if (counts := self.progress.pop(record.id, None)) is not None:

            def counted(record: BatchRecord) -> BatchRecord:
                more = msgspec.structs.replace(record, completed=counts[0], failed=counts[1])
                return record if record.ended else more

            with suppress(Error):
                record = await self.change(record.id, counted)
        return record.public()

    async def listed(self, query: dict[str, str], owner: Owner | None = None) -> dict[str, Any]:
        """A page in OpenAI's form. Raises: BadRequest."""
        page = Page.of(query, most=_MOST_LISTED, default=_LISTED)
        found, more = page.cut(self._records, lambda one: is_for(owner, one.tenant))
        return shown([await self.shown(one) for one in found], has_more=more)

    async def create(self, content: bytes, owner: Owner | None = None) -> BatchRecord:
        """Raises: BadRequest, Forbidden, NotFound, TooLarge, StorageFull, Unavailable."""
        asked = _read(content, (*ENDPOINTS, *self._own_endpoints()))
        file = self._files.get(asked.input_file_id, owner)
        if owner is not None:
            owner.check_endpoint(asked.endpoint)
        if file.purpose != INPUT:
            raise BadRequest(
                f"The file has the purpose '{file.purpose}'; inputs of batches have '{INPUT}'.",
                param="input_file_id",
            )
        if file.bytes > self._config.max_batch_bytes:
            raise TooLarge(
                f"The file has {file.bytes:,} bytes; the input of a batch may have "
                f"{self._config.max_batch_bytes:,}. Split it.",
                param="input_file_id",
            )
        expires = asked.output_expires_after
        keep_s = (
            expires_after_s(expires.anchor, expires.seconds, "output_expires_after") if expires else KEEP_S
        )
        record = BatchRecord(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            status="validating",
            created_at=now_s(),
            expires_at=now_s() + window_s(asked.completion_window),
            output_file=new_id("file-"),
            error_file=new_id("file-"),
            output_expires_s=keep_s,
            metadata=asked.metadata,
        )
        if owner is not None:
            record = msgspec.structs.replace(
                record, tenant=owner.tenant, key=owner.key, may_name=owner.models
            )
        self._creating.append(record)
        try:
            async with self._writing:
                await self._write(record)
        finally:
            self._creating.remove(record)
        return record

    async def cancel(self, batch_id: str, owner: Owner | None = None) -> BatchRecord:
        """Raises: NotFound; Conflict when it has ended."""
        self.get(batch_id, owner)

        def cancelling(record: BatchRecord) -> BatchRecord:
            if record.ended or record.status == "finalizing":
                raise Conflict(f"The batch is {record.status}; it cannot be cancelled any more.")
            return record if record.status == "cancelling" else record.to("cancelling")

        return await self.change(batch_id, cancelling)

    async def change(self, batch_id: str, changed: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Replaces a record; one change after another.

        Raises: what `changed` raises; StorageFull, Unavailable.
        """
        async with self._writing:
            before = self.get(batch_id)
            record = changed(before)
            if record is not before:
                await completed(self._write(record))
        return record

    async def _write(self, record: BatchRecord) -> None:
        await asyncio.to_thread(self._storage.write, FOLDER, record.id, record)
        self._records[record.id] = record

    async def remove_expired(self) -> None:
        """Removes batches that ended so long ago that their files have expired. Raises: Unavailable."""
        for record in list(self._records.values()):
            if record.ended_at is not None and record.ended_at + KEEP_S <= now_s():
                await completed(self._remove(record.id))

    async def _remove(self, batch_id: str) -> None:
        await asyncio.to_thread(self._storage.remove, FOLDER, batch_id)
        self._records.pop(batch_id, None)
        self.progress.pop(batch_id, None)
        await asyncio.to_thread(self._storage.remove_tree, f"{FOLDER}/{batch_id}")


def _read(content: bytes, endpoints: Collection[str]) -> CreateBatch:
    """Raises: BadRequest."""
    try:
        asked = _parsed(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(error) from error
    if asked.endpoint not in endpoints:
        raise BadRequest(
            f"endpoint is {asked.endpoint[:80]!r}; batches may use {', '.join(endpoints)}.", param="endpoint"
        )
    data = asked.metadata or {}
    if len(data) > _METADATA or any(len(k) > _KEY_CHARS or len(v) > _VALUE_CHARS for k, v in data.items()):
        raise BadRequest(
            f"metadata may have {_METADATA} keys of {_KEY_CHARS} characters, with values of {_VALUE_CHARS}.",
            param="metadata",
        )
    return asked
