"""Rows still to run, and the requests made of them, on threads.

Here an exception becomes the failure of its row: bad input, or a fault in our own code.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from typing import TypeVar

import msgspec

from penstock.data.job.prefix import PendingRow, prompt_prefix
from penstock.data.job.spec import JobSpec
from penstock.data.journal.index import Index
from penstock.data.journal.segment import Entry
from penstock.data.results.outcome import SKIPPED, Failure, Outcome
from penstock.data.rows.builder import build_request, prompt_as_message
from penstock.data.rows.digest import is_deterministic, request_digest
from penstock.data.rows.input_columns import check_defaults
from penstock.data.rows.request import RowRequest
from penstock.data.rows.template import PromptTemplate
from penstock.data.storage.readers import InputRow, batched
from penstock.data.storage.source import InputFiles
from penstock.errors import BadRequest, ConfigError, Error

log = logging.getLogger(__name__)

_THREADS, _ROWS_OF_A_THREAD = 8, 8
"""Threads that build requests, and rows per task of one."""

_MOST_BYTES = 16 << 20
"""Limit of the rows that threads work on, or have made requests of."""

Made = TypeVar("Made")


class PendingRows:
    """Rows of a job to run, as requests; rows that need not or cannot run, as entries.

    total: rows of the input up to the limit; known at the end.
    """

    def __init__(
        self, spec: JobSpec, source: InputFiles, index: Index, other: Index | None, *, retry: bool
    ) -> None:
        self.total = 0
        self._spec, self._source, self._index = spec, source, index
        self._builder, self._retry = RequestBuilder(spec), retry
        self._other = other

    def ended_before(self) -> int:
        """Rows that earlier runs completed, without those that run again."""
        counts = self._index.counts()
        return sum(counts.values()) - counts["failed"] + self.failed_before()

    def failed_before(self) -> int:
        """Of these, rows that failed."""
        return 0 if self._retry else self._index.counts()["failed"]

    def __iter__(self) -> Iterator[PendingRow | Entry]:
        limit = self._spec.limit
        rows = self._source.rows(self._wanted)
        return map_in_threads(
            self._pending_row, takewhile(lambda row: limit is None or row.number < limit, rows)
        )

    def _wanted(self, number: int) -> bool:
        """Called by the reader for every row, in order."""
        if self._spec.limit is None or number < self._spec.limit:
            self.total = number + 1
        state = self._index.state(number)
        return state is None or (self._retry and state == "failed")

    def _pending_row(self, row: InputRow) -> PendingRow | Entry:
        try:
            pending_row = self._builder.pending_row(row)
        except Exception as error:
            if not isinstance(error, Error):
                log.warning("Row %d failed in our own code.", row.number, exc_info=error)
            failure = Failure.from_error(error, "read" if row.fields is None else "preprocess")
            return Entry(row.number, Outcome(state="failed", failure=failure))
        if pending_row is None:
            return Entry(row.number, SKIPPED)
        pending_row.deaths = 0 if self._retry else self._index.deaths.get(row.number, 0)
        if pending_row.key is None:
            return pending_row
        if (same := self._index.row_with(pending_row.key)) is not None:
            return Entry(row.number, duplicate_of=same)
        if self._other is not None and (other := self._other.row_with(pending_row.key)) is not None:
            return Entry(row.number, self._other.outcome(other), key=pending_row.key, reused=True)
        return pending_row


def map_in_threads(make: Callable[[InputRow], Made], rows: Iterator[InputRow]) -> Iterator[Made]:
    """`make` of each row, in order, on several threads: it may read images from a bucket."""

    def make_all(some: list[InputRow]) -> list[Made]:
        return [make(row) for row in some]

    with ThreadPoolExecutor(_THREADS, "rows") as pool:
        made: deque[tuple[int, Future[list[Made]]]] = deque()
        for some in batched(rows, _ROWS_OF_A_THREAD, _MOST_BYTES // _THREADS):
            made.append((sum(row.size_bytes for row in some), pool.submit(make_all, some)))
            del some
            while len(made) > _THREADS or sum(size for size, _ in made) >= _MOST_BYTES:
                yield from made.popleft()[1].result()
        while made:
            yield from made.popleft()[1].result()


class RequestBuilder:
    """Builds requests from rows: the same ones in every run of a job."""

    def __init__(self, spec: JobSpec) -> None:
        """Raises: ConfigError for options that do not go together, and for unknown parameters."""
        self._spec, self._task = spec, spec.task()
        if spec.template is not None and spec.kind == "score":
            raise ConfigError("--prompt does not go with --task score: rows need 'text_1' and 'text_2'.")
        if spec.system is not None and spec.template is None:
            raise ConfigError("--system goes with --prompt; rows with messages have their own.")
        if spec.system is not None and not spec.chat:
            raise ConfigError("--system goes with a chat; with --no-chat write its text into --prompt.")
        if spec.kind != "generate" and (spec.system is not None or not spec.chat):
            what = "--system" if spec.system is not None else "--no-chat"
            raise ConfigError(f"{what} has no effect with --task {spec.kind}; leave it out.")
        if spec.is_openai_batch and (spec.defaults or spec.template is not None):
            what = "--prompt" if spec.template is not None else "--param and --max-tokens"
            raise ConfigError(
                f"{what}: no effect on OpenAI's batch lines, whose bodies are sent as they are."
            )
        self.template: PromptTemplate | None = None
        if spec.template is not None:
            self.template = PromptTemplate(spec.template, kind=spec.kind, system=spec.system, chat=spec.chat)
        try:
            check_defaults(spec.defaults, spec.kind)
        except BadRequest as error:
            raise ConfigError(f"--param: {error}") from error
        self._salt = msgspec.json.encode((spec.kind, spec.engines.identity), order="sorted")

    def pending_row(self, row: InputRow) -> PendingRow | None:
        """The row with its request; None for a row to skip, where all columns in --prompt are empty.

        Raises: Error, with why no request can be made.
        """
        if row.fields is None:
            raise BadRequest(row.fault or "The row cannot be read.")
        template = self.template
        if template is not None and template.is_blank(row.fields):
            return None
        fields = row.fields if template is None else template.fields(row.fields)
        if self._spec.prompts_as_messages:
            fields = prompt_as_message(fields)
        request = build_request(fields, self._task, self._spec.defaults)
        prefix = prompt_prefix(request) if self._spec.group_prefixes else b""
        return PendingRow(row.number, request, self._key(request), 0, prefix)

    def _key(self, request: RowRequest) -> str | None:
        if self._spec.reuse == "off" or request.prompt is not None:
            return None
        if self._spec.reuse == "exact" and not is_deterministic(request):
            return None
        return request_digest(request, self._salt)
