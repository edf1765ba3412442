"""The Files API's store: records in memory, the same on disk, and the contents there.

Used on the event loop of its service, which alone writes. Below it: storage.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.config.schema.jobs import JobsConfig
from penstock.data.storage.paths import StoragePath
from penstock.errors import Conflict, NotFound, StorageFull
from penstock.jobs.owner import DEFAULT, Owner, is_for
from penstock.jobs.parameters import KEEP_S, Page, expires_after_s, shown
from penstock.jobs.records import INPUT, FileRecord, new_id, now_s
from penstock.jobs.storage import JobStorage
from penstock.jobs.upload import Upload, check_purpose
from penstock.on_thread import completed

FOLDER = "files"
_FEED_BYTES = 1 << 20
_MOST_LISTED, _LISTED = 10_000, 1_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME_CHARS = 255


@dataclass(slots=True)
class FileStore:
    """reader_of: the unfinished batch that reads a file, by its id; such a file cannot be deleted."""

    _config: JobsConfig
    _storage: JobStorage
    reader_of: Callable[[str], str | None] = lambda file_id: None
    _records: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    _uploading: dict[str, Upload] = field(default_factory=dict[str, Upload])

    def load(self) -> None:
        """Reads all records, and removes contents without one: uploads that were not finished. Blocks."""
        found = self._storage.read_all(FOLDER, FileRecord)
        self._records = {file_id: one for file_id, one in found.items() if one is not None}
        for file in (self._storage.root / FOLDER).files():
            if file.name.partition(".")[0] not in found:
                (self._storage.root / FOLDER / file.name).remove()

    def get(self, file_id: str, owner: Owner | None = None) -> FileRecord:
        """Raises: NotFound, also for a file of another tenant than `owner`'s."""
        record = self._records.get(file_id)
        if (
            record is None
            or not is_for(owner, record.tenant)
            or (record.expired and self.reader_of(file_id) is None)
        ):
            raise NotFound(f"There is no file '{file_id[:80]}'; it may have expired or been deleted.")
        return record

    async def content(self, file_id: str, owner: Owner | None = None) -> tuple[StoragePath, int]:
        """Where a file's content is, and its size in bytes. Raises: NotFound, Unavailable."""
        path = self.get(file_id, owner).path
        size = await asyncio.to_thread(self._storage.size_bytes, path)
        if size is None:
            raise NotFound(f"The content of '{file_id}' is not in the storage any more.")
        return self._storage.root / path, size

    def listed(self, query: dict[str, str], owner: Owner | None = None) -> dict[str, Any]:
        """A page in OpenAI's form. Raises: BadRequest."""
        purpose = query.get("purpose")
        page = Page.of(query, most=_MOST_LISTED, default=_LISTED)
        found, more = page.cut(
            self._records,
            lambda one: purpose in (None, one.purpose) and not one.expired and is_for(owner, one.tenant),
        )
        return shown([one.public() for one in found], has_more=more)

    async def create(
        self, content_type: str, pieces: AsyncIterator[bytes], owner: Owner | None = None
    ) -> FileRecord:
        """Takes an upload. Raises: BadRequest, TooLarge, StorageFull, Unavailable."""
        file_id = new_id("file-")
        path = f"{FOLDER}/{file_id}.jsonl"
        upload = Upload(
            content_type, self._storage.root / path, most=self._config.max_file_bytes, room=self._room
        )
        self._uploading[file_id] = upload
        try:
            await _feed(upload, pieces)
            upload.check()
            keep_s = _checked(upload.fields)
            record = FileRecord(
                id=file_id,
                bytes=upload.size_bytes,
                created_at=now_s(),
                filename=_CONTROL.sub("", upload.filename)[:_NAME_CHARS] or "file",
                purpose=INPUT,
                path=path,
                expires_at=now_s() + keep_s,
                tenant=owner.tenant if owner is not None else DEFAULT,
            )
            await completed(self._keep(upload, record))
        finally:
            del self._uploading[file_id]
            await completed(asyncio.to_thread(upload.abort))
        return record

    async def _keep(self, upload: Upload, record: FileRecord) -> None:
        await asyncio.to_thread(upload.end)
        try:
            await self._add(record)
        except StorageFull:
            await asyncio.to_thread((self._storage.root / record.path).remove)
            raise

    async def add(self, record: FileRecord) -> None:
        """A file whose content is at its path. Raises: StorageFull, Unavailable."""
        await completed(self._add(record))

    async def _add(self, record: FileRecord) -> None:
        await asyncio.to_thread(self._storage.write, FOLDER, record.id, record)
        self._records[record.id] = record

    async def delete(self, file_id: str, owner: Owner | None = None) -> dict[str, Any]:
        """Raises: NotFound; Conflict while a batch reads it."""
        await completed(self._remove(self.get(file_id, owner)))
        return {"id": file_id, "object": "file", "deleted": True}

    async def remove_expired(self) -> None:
        for record in list(self._records.values()):
            if record.expired and self.reader_of(record.id) is None:
                await completed(self._remove(record))

    async def _remove(self, record: FileRecord) -> None:
        """From memory first, so that no batch takes it meanwhile; its content last: one without a record is
        removed at the next start. Raises: Conflict while a batch reads it.
        """
        if (batch := self.reader_of(record.id)) is not None:
            raise Conflict(f"The file is the input of '{batch}', which has not ended; cancel that first.")
        if self._records.pop(record.id, None) is None:
            return
        try:
            await asyncio.to_thread(self._storage.remove, FOLDER, record.id)
        except Exception:
            self._records[record.id] = record
            raise
        await asyncio.to_thread((self._storage.root / record.path).remove)

    def _room(self) -> int | None:
        """Bytes that are left beside all files and uploads. On any thread."""
        if self._config.max_storage_bytes is None:
            return None
        stored, uploading = self._records, list(self._uploading.items())
        coming = sum(one.size_bytes for file_id, one in uploading if file_id not in stored)
        return self._config.max_storage_bytes - coming - sum(one.bytes for one in list(stored.values()))


async def _feed(upload: Upload, pieces: AsyncIterator[bytes]) -> None:
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        if len(waiting) >= _FEED_BYTES:
            data, waiting = bytes(waiting), bytearray()
            await completed(asyncio.to_thread(upload.feed, data))
    await completed(asyncio.to_thread(upload.feed, bytes(waiting)))


def _checked(fields: dict[str, str]) -> int:
    """How long to keep the file. Raises: BadRequest."""
    check_purpose(fields.get("purpose"))
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return KEEP_S
    return expires_after_s(anchor, seconds, "expires_after")
