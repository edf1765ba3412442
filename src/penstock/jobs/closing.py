"""Ends a job that was stopped: rows without an outcome get a failure, and its next run writes the output."""

from __future__ import annotations

import shutil

from penstock.data.job import manifest
from penstock.data.job.spec import JobSpec
from penstock.data.journal.index import Index
from penstock.data.journal.lock import acquire_lock
from penstock.data.journal.segment import Entry, Segment, next_run
from penstock.data.results.outcome import Failure, failed
from penstock.errors import ConfigError
from penstock.temporary_folder import temporary_folder


def close_unfinished(spec: JobSpec, failure: Failure) -> int:
    """How many rows were left. A row that has an outcome keeps it. Blocks.

    Raises: ConfigError when there is no such job; OutputLocked while it runs; Unavailable.
    """
    found = manifest.read(spec.journal)
    if found is None:
        raise ConfigError(f"'{spec.output}' has no job to close.")
    total = found.total if found.total is not None else found.source.count()
    lock, spool = acquire_lock(spec.journal), temporary_folder("batch")
    try:
        index = Index(spec.journal, None if spec.journal.is_local else spool)
        left = [row for row in range(total) if index.state(row) is None]
        index.close()
        segment = Segment(spec.journal, f"{next_run(spec.journal):04d}-closed")
        for row in left:
            segment.append(Entry(row, failed(failure)), lambda: None)
        segment.close()
    finally:
        shutil.rmtree(spool, ignore_errors=True)
        lock.release()
    return len(left)
