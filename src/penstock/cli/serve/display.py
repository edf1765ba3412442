"""What the terminal shows while a service starts: one row per part, its phases, and their seconds.

A `Display` holds the rows; `Plain` prints a line for each change, `Live` redraws a table. Neither knows what
the parts are.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live as RichLive
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.cli.serve.durations import Durations
from penstock.json_logs import entry

_LOGGER = "penstock.cli.serve"
Clock = Callable[[], float]


@dataclass(slots=True)
class Row:
    """One part: the phases that it entered, and when it was done with them. Times in seconds of the clock."""

    label: str
    phases: list[tuple[str, float]]
    ended: float | None = None
    failed: bool = False

    @property
    def phase(self) -> str:
        """The phase that it is in, or how it ended."""
        if self.ended is None:
            return self.phases[-1][0]
        return "failed" if self.failed else "ready"

    def seconds(self, now: float) -> float:
        return (self.ended if self.ended is not None else now) - self.phases[0][1]

    def spans(self, now: float) -> list[tuple[str, float]]:
        """Each phase and how long it took, or takes until `now`."""
        starts = [start for _, start in self.phases]
        ends = [*starts[1:], self.ended if self.ended is not None else now]
        return [(phase, end - start) for (phase, start), end in zip(self.phases, ends, strict=True)]


class Display:
    """Where parts are announced: keeps their rows, in the order in which they began.

    `begin` is the clock's time of second 0. `at` is in seconds of the monotonic clock; None is now. `last`
    has the durations of an earlier start. This class itself shows no row: `penstock serve --quiet`.
    """

    def __init__(
        self, out: TextIO, begin: float, clock: Clock = time.monotonic, last: Durations | None = None
    ) -> None:
        self._out, self._begin, self._clock = out, begin, clock
        self._rows: dict[str, Row] = {}
        self._last = last or {}

    def enter(self, label: str, phase: str, at: float | None = None) -> Row:
        """The part is in `phase` from now on; a part that had ended starts anew. Returns its row.

        "download (1.0 of 3.0 GB)" says how far the phase "download" is, and begins none.
        """
        entered = at = self._clock() if at is None else at
        row = self._rows.get(label)
        if row is None or row.ended is not None:
            row = self._rows[label] = Row(label, [])
        name, _, detail = phase.partition(" (")
        if detail and row.phases and row.phases[-1][0].partition(" (")[0] == name:
            entered = row.phases.pop()[1]
        row.phases.append((phase, entered))
        self._show(row, at)
        return row

    def end(self, label: str, at: float | None = None, *, failed: bool = False) -> None:
        at = self._clock() if at is None else at
        row = self._rows.setdefault(label, Row(label, [("starting", at)]))
        row.ended, row.failed = at, failed
        self._show(row, at)

    def close(self, *, failed: bool = False) -> None:
        """No part changes any more. failed: those that were not done did not get there."""
        for row in list(self._rows.values()):
            if failed and row.ended is None:
                self.end(row.label, failed=True)

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def remind(self) -> None:
        """Nothing has changed for a while."""

    def durations(self) -> Durations:
        """Of the parts that are done."""
        return {
            label: {phase.partition(" (")[0]: seconds for phase, seconds in row.spans(row.ended)}
            for label, row in self._rows.items()
            if row.ended is not None and not row.failed
        }

    def _running(self, row: Row, now: float) -> str:
        """The phase, how long it has taken, and how long it took the last time."""
        (phase, seconds) = row.spans(now)[-1]
        before = self._last.get(row.label.partition(" (")[0], {}).get(phase.partition(" (")[0], 0.0)
        return f"{phase} {seconds:.0f}{f' of about {before:.0f}' if before >= 1 else ''} s"

    def _show(self, row: Row, at: float) -> None:
        """A row that has entered a phase, or ended."""


def display_for(out: TextIO, *, as_json: bool = False, quiet: bool = False) -> type[Display]:
    """A table that is redrawn where `out` is a terminal, else a line for each change; or JSON lines."""
    return Display if quiet else JSONDisplay if as_json else Live if out.isatty() else Plain


class Plain(Display):
    """One line for each change, with the second at which it happened. For logs and pipes."""

    def _show(self, row: Row, at: float) -> None:
        text = f"{at - self._begin:6.1f} s  {row.label}: {row.phase}"
        if row.ended is not None:
            text += f" after {row.seconds(at):.1f} s"
            if len(row.phases) > 1:
                text += f" ({', '.join(f'{phase} {seconds:.1f}' for phase, seconds in row.spans(at))})"
        self.say(text)

    def remind(self) -> None:
        now = self._clock()
        going = [
            f"{row.label}: {self._running(row, now)}" for row in self._rows.values() if row.ended is None
        ]
        if going:
            self.say(f"{now - self._begin:6.1f} s  {'; '.join(going)}")


class JSONDisplay(Display):
    """One JSON object for each change and each text, of the form of log lines."""

    def say(self, text: str) -> None:
        self._line(text.strip())

    def _show(self, row: Row, at: float) -> None:
        took = {} if row.ended is None else {"seconds": round(row.seconds(at), 1)}
        self._line(f"{row.label}: {row.phase}", part=row.label, phase=row.phase, **took)

    def _line(self, message: str, **facts: str | float) -> None:
        line = entry(message, "INFO", _LOGGER, time.time()) | facts
        print(json.dumps(line, ensure_ascii=False), file=self._out, flush=True)


class Live(Display):
    """A table with a spinner in each row that is not done; what is said stands above it, or after `close`."""

    def __init__(
        self, out: TextIO, begin: float, clock: Clock = time.monotonic, last: Durations | None = None
    ) -> None:
        super().__init__(out, begin, clock, last)
        self._console = Console(file=out, highlight=False)
        self._spinner = Spinner("dots", style="cyan")
        self._live = RichLive(
            console=self._console,
            get_renderable=self._table,
            refresh_per_second=10,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        super().close(failed=failed)
        self._live.stop()

    def _table(self) -> Table:
        now = self._clock()
        table = Table.grid(padding=(0, 2))
        for row in list(self._rows.values()):
            table.add_row(
                self._mark(row),
                Text(row.label, style="bold"),
                Text(f"{row.seconds(now):.1f} s", justify="right"),
                Text(self._phases(row, now), style="dim"),
            )
        return table

    def _mark(self, row: Row) -> Text | Spinner:
        if row.ended is None:
            return self._spinner
        return Text("✗", style="red") if row.failed else Text("✓", style="green")

    def _phases(self, row: Row, now: float) -> str:
        *passed, (phase, seconds) = row.spans(now)
        if not passed and row.ended is not None:
            return ""
        last = self._running(row, now) if row.ended is None else f"{phase} {seconds:.1f}"
        return " · ".join([*(f"{name} {took:.1f}" for name, took in passed), last])
