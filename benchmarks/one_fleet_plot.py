"""A run of `one_fleet` as SVG, over time: online's load, batch's limit, TTFT and steps against targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.one_fleet_run import Seen
from penstock.serve.replica.tiers.controller import Targets

WIDTH, HEIGHT = 760, 140  # of a panel; units: pixels
LEFT, TOP, BETWEEN = 50, 30, 45
EVERY = 10  # ticks of the controller, of the engine's steps
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "#888888"
STYLE = "text { font: 12px sans-serif; fill: #333 }"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the plots that share the axis of time. points: time in seconds, and a value."""

    title: str
    points: Points
    dots: bool = False
    target: float | None = None

    @property
    def most(self) -> float:
        """The top of its axis: a round number."""
        largest = max([*(value for _, value in self.points), self.target or 0.0, 1.0])
        return next(top for top in _round() if top >= largest)


def drawn(seen: Seen, targets: Targets, begin_s: float, seconds: float) -> str:
    """The SVG. begin_s: of the run's clock, where the axis of time begins."""
    firsts = [(at - begin_s, ttft_s * 1e3) for at, ttft_s in seen.firsts if at >= begin_s]
    arrivals = Counter(int(at) for at, _ in firsts)
    panels = [
        Panel("Online requests per second", [(at, arrivals[at]) for at in range(int(seconds))]),
        Panel("Batch requests that may run", [(at - begin_s, limit) for at, limit, _ in seen.ticks]),
        Panel(
            "Time to first token of each online request, ms; dashed: the target",
            firsts,
            dots=True,
            target=_ms(targets.ttft_s),
        ),
        Panel(
            "Steps of the engine, 99th percentile, ms; dashed: the target for the time between two tokens",
            [(at - begin_s, step_s * 1e3) for at, _, step_s in seen.ticks[::EVERY]],
            target=_ms(targets.itl_s),
        ),
    ]
    height = TOP + len(panels) * (HEIGHT + BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _panel(panel, TOP + place * (HEIGHT + BETWEEN), seconds)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, top: float, seconds: float) -> Iterator[str]:
    bottom = top + HEIGHT

    def x(at: float) -> float:
        return LEFT + WIDTH * at / seconds

    def y(value: float) -> float:
        return bottom - HEIGHT * value / panel.most

    yield f'<text x="{LEFT}" y="{top - 8}">{panel.title}</text>'
    yield f'<path d="M{LEFT} {top}V{bottom}H{LEFT + WIDTH}" stroke="{GREY}" fill="none"/>'
    for value in (0, panel.most / 2, panel.most):
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.0f}" text-anchor="end">{value:g}</text>'
    for at in range(0, int(seconds) + 1, 10):
        yield f'<text x="{x(at):.0f}" y="{bottom + 15}" text-anchor="middle">{at} s</text>'
    if panel.target is not None:
        at = f"{y(panel.target):.1f}"
        yield f'<path d="M{LEFT} {at}h{WIDTH}" stroke="{ORANGE}" stroke-dasharray="6 4"/>'
    if panel.dots:
        dots = "".join(f"M{x(at):.1f} {y(value):.1f}h0" for at, value in panel.points)
        yield f'<path d="{dots}" stroke="{BLUE}" stroke-width="3" stroke-linecap="round"/>'
    else:
        steps = "".join(f"H{x(at):.1f}V{y(value):.1f}" for at, value in _changes(panel.points))
        yield f'<path d="M{LEFT} {bottom}{steps}H{LEFT + WIDTH}" stroke="{BLUE}" fill="none"/>'


def _ms(seconds: float | None) -> float | None:
    return seconds * 1e3 if seconds else None


def _changes(points: Points) -> Iterator[tuple[float, float]]:
    """Where the value changes."""
    last = None
    for at, value in points:
        if value != last:
            yield at, value
            last = value


def _round() -> Iterator[float]:
    """1, 2, 4, 6, 8, 10, 20, 40 and so on."""
    unit = 1.0
    while True:
        yield from (unit, 2 * unit, 4 * unit, 6 * unit, 8 * unit)
        unit *= 10
