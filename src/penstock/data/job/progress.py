"""Who looks on while a job runs. The command's screen is one; without any, nothing is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data.job.manifest import Record
    from penstock.data.job.report import Tally


class Watcher:
    """Told of a job's steps, on its event loop; must be quick. This one says nothing."""

    def begun(self, record: Record, tally: Tally) -> None:
        """The input is known, and what earlier runs have done."""

    def phase(self, worker: str, phase: str) -> None:
        """A worker entered a phase of its start; "ready" and "gone" are the last ones."""

    def look(self, tally: Tally) -> None:
        """Several times a second."""

    def said(self, text: str) -> None:
        """A sentence for the user."""
