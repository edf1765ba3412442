"""A multipart upload, written to storage as it comes: only what is being parsed is in memory.

Source: RFC 7578. Its syntax is python-multipart's; limits, fields and the file are ours.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.data.storage.paths import StoragePath, atomic_write
from penstock.errors import BadRequest, StorageFull, TooLarge
from penstock.jobs.records import INPUT
from penstock.jobs.storage import refusals

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of what we refuse

_FIELD_BYTES = 4096
_PARTS = 17  # the file and 16 fields
_FORM_BYTES = 256 * 1024  # all that is not the file: heads of parts, fields, what follows the last boundary
_FORM = b"multipart/form-data"


class Upload:
    """One upload. Call `feed` with its bytes, then `end`; `abort` drops the file unless `end` has returned.

    fields: of the form, without the file. Blocks; one thread at a time.
    """

    def __init__(
        self, content_type: str, to: StoragePath, *, most: int, room: Callable[[], int | None]
    ) -> None:
        """most: bytes of the file. room: those that storage may still take, negative where it has too many
        with this upload's; None for no limit.

        Raises: BadRequest for another type than a form's.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != _FORM or not boundary:
            raise BadRequest("Send the file as multipart/form-data, with the fields 'purpose' and 'file'.")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.size_bytes = 0
        self._to, self._most, self._room = to, most, room
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._name: str | None = None
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._field = bytearray()
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._parts = self._form_bytes = 0
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        made: Any = callbacks  # its TypedDict lists the same names
        try:
            self._parser = MultipartParser(boundary, made)
        except FormParserError as error:
            raise BadRequest("The form's boundary cannot be read: it may have 256 characters.") from error

    def feed(self, data: bytes) -> None:
        """Raises: BadRequest, TooLarge, StorageFull, Unavailable."""
        before = self.size_bytes
        try:
            with refusals():
                self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The form cannot be read: {error}.") from error
        self._form_bytes += len(data) - (self.size_bytes - before)
        if self._form_bytes > _FORM_BYTES:
            raise BadRequest(f"The form has more than {_FORM_BYTES:,} bytes beside its file.")
        if (room := self._room()) is not None and room < 0:
            left = max(0, room + self.size_bytes)
            raise StorageFull(f"The file does not fit: {left:,} bytes are left for files. Delete some first.")

    def check(self) -> None:
        """Whether all of the form has come, with a file. Raises: BadRequest."""
        if not self._ended:
            raise BadRequest("The upload is incomplete; send the file again.")
        if self._file is None:
            raise BadRequest("The form has no part named 'file'.", param="file")
        if not self.size_bytes:
            raise BadRequest("The file is empty.", param="file")
        self._check_text(b"", final=True)

    def end(self) -> None:
        """The file is at its place now. Raises: StorageFull, Unavailable."""
        with refusals():
            self._stack.close()

    def abort(self) -> None:
        """Safe to call twice, and after `end`."""
        error = BadRequest("The upload was not finished.")
        self._stack.__exit__(BadRequest, error, None)

    def _on_part_begin(self) -> None:
        self._headers, self._name, self._field = {}, None, bytearray()
        self._parts += 1
        if self._parts > _PARTS:
            raise BadRequest(f"The form has more than {_PARTS} parts; 'purpose' and 'file' are enough.")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name != "file":
            return
        if self._file is not None:
            raise BadRequest("The form has two files; upload them one by one.", param="file")
        check_purpose(self.fields.get("purpose", INPUT))
        self.filename = options.get(b"filename", b"").decode(errors="replace") or "file"
        self._file = self._stack.enter_context(atomic_write(self._to))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file" or self._file is None:
            self._field += data[start:end]
            if len(self._field) > _FIELD_BYTES:
                raise BadRequest(f"The form's field {self._name!r} has more than {_FIELD_BYTES:,} bytes.")
            return
        self.size_bytes += end - start
        if self.size_bytes > self._most:
            raise TooLarge(f"The file is larger than {self._most:,} bytes, the limit for one file.")
        self._check_text(data[start:end])
        self._file.write(memoryview(data)[start:end])

    def _check_text(self, piece: bytes, *, final: bool = False) -> None:
        """Whether the file is UTF-8 so far; JSON has no zeros, but UTF-16 has. Raises: BadRequest."""
        try:
            self._decoder.decode(piece, final)
            odd = 0 if b"\0" in piece else None
        except UnicodeDecodeError as error:
            odd = error.object[error.start]
        if odd is not None:
            raise BadRequest(f"The file is not UTF-8 (byte {odd:#04x}); save it as UTF-8.", param="file")

    def _on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name or ""] = self._field.decode(errors="replace")

    def _on_end(self) -> None:
        self._ended = True


def check_purpose(purpose: str | None) -> None:
    """Raises: BadRequest."""
    if purpose is None:
        raise BadRequest("The form has no field 'purpose'; it must be 'batch'.", param="purpose")
    if purpose != INPUT:
        raise BadRequest(
            f"purpose is {purpose[:40]!r}; files here are inputs of batches: it must be 'batch'.",
            param="purpose",
        )
