"""From outcomes to what is reported: percentiles, rates, errors by kind, goodput, the client's own strain.

What counts is what was due in the measured time. Latencies are those of complete answers, counted from when a
request was due. Rates count what came in the measured time, of complete answers only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.bench.load.outcome import UNFINISHED, RequestOutcome, RequestTiming
from penstock.bench.load.workers import Measured
from penstock.errors import ConfigError

_BUSY = 0.8
"""Share of a core from which on a worker is taken to be the bottleneck."""
_LATE_MS = 10.0
"""Lag of the event loop at p99 from which on latencies are doubted."""

_LATENCIES = ("ttft", "itl", "tpot", "e2e")
_TARGET = re.compile(r"(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)")
_GAPS_WITHIN = 0.99


@dataclass(frozen=True, slots=True)
class SLO:
    """What a user calls good enough: limits in seconds, all to be kept. itl: by 99 % of a request's gaps."""

    limits: tuple[tuple[str, float], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ConfigError for another form than `ttft=200ms,e2e=5s`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = _TARGET.fullmatch(part.strip())
            if match is None or match[1] not in _LATENCIES:
                raise ConfigError(
                    f"--slo {part.strip()!r} is not a target; write name=limit with a unit, like "
                    f"ttft=200ms,itl=30ms. Names are {', '.join(_LATENCIES)}."
                )
            limits[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return cls(tuple(limits.items()), text)

    def kept(self, timing: RequestTiming) -> bool:
        """Whether a complete answer kept every limit. An answer of one token has no gap to be too long."""
        gaps = sorted(timing.gaps)
        itl = gaps[math.ceil(_GAPS_WITHIN * len(gaps)) - 1] if gaps else 0.0
        took = {"ttft": timing.ttft, "itl": itl, "tpot": timing.tpot or 0.0, "e2e": timing.e2e}
        return all(took[name] <= limit for name, limit in self.limits)


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are distributed. Percentiles are interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Self | None:
        """Of the values times `scale`; None without values."""
        ordered = sorted(scale * value for value in values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(len(ordered), mean, p50, p90, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of at least one value, in ascending order."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Requests that failed alike. begun: some text had come before."""

    kind: str
    begun: bool
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class ClientStrain:
    """The client itself. cpu: of its busiest worker, as share of a core; machine_cpu: of all cores.

    sent_late_ms: how long after it was due a request was sent; None in a closed loop, where that is the same.
    """

    workers: int
    cpu: float
    machine_cpu: float
    loop_late_ms: Spread | None
    sent_late_ms: Spread | None
    was_bottleneck: bool
    waited_for_a_core: bool


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What became of the requests of a level."""

    good: int
    failed: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One level, as it is written as JSON, but for `begin`. Rates are per second of `seconds`."""

    begin: float
    load: str
    concurrency: int | None
    rate: float | None
    warmup_s: float
    seconds: float
    stopped_early: bool
    requests: RequestCounts
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_event: float
    tokens_counted_by: str
    cached_share: float | None
    prompt_tokens: Spread | None
    completion_tokens: Spread | None
    ttft_ms: Spread | None
    ttft_later_turns_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    goodput_per_s: float | None
    kept_slo: int | None
    failures: tuple[FailureGroup, ...]
    client: ClientStrain


def figures(measured: Measured, slo: SLO | None) -> Figures:
    """Everything about one level."""
    level = measured.level
    counted = [outcome for outcome in measured.outcomes if outcome.counted]
    good = [outcome for outcome in counted if outcome.good]
    failed = [outcome for outcome in counted if not outcome.good and outcome.error != UNFINISHED]
    timings = [RequestTiming.of(outcome) for outcome in good]
    begin, end = window(measured, counted)
    seconds = max(end - begin, 1e-9)
    complete = [outcome for outcome in measured.outcomes if outcome.good]
    read = sum(o.prompt_tokens or 0 for o in complete if begin <= o.times()[0] <= end)
    by_usage = all(outcome.completion_tokens is not None for outcome in good)
    first_turns = [timing for timing, outcome in zip(timings, good, strict=True) if not outcome.turn]
    later_turns = [timing for timing, outcome in zip(timings, good, strict=True) if outcome.turn]
    kept = None if slo is None else sum(slo.kept(timing) for timing in timings)
    return Figures(
        begin=begin,
        load=level.title,
        concurrency=level.concurrency,
        rate=level.rate,
        warmup_s=level.warmup_s,
        seconds=seconds,
        stopped_early=measured.stopped,
        requests=RequestCounts(len(good), len(failed), len(counted) - len(good) - len(failed)),
        requests_per_s=sum(begin <= outcome.ended <= end for outcome in complete) / seconds,
        input_tokens_per_s=read / seconds,
        output_tokens_per_s=_output_tokens(complete, begin, end) / seconds,
        tokens_per_event=_ratio(sum(o.tokens() for o in good), sum(o.event_count() for o in good)) or 1.0,
        tokens_counted_by="usage" if by_usage and good else "events",
        cached_share=_cached(good),
        prompt_tokens=Spread.of(o.prompt_tokens for o in good if o.prompt_tokens is not None),
        completion_tokens=Spread.of(o.tokens() for o in good),
        ttft_ms=Spread.of((timing.ttft for timing in first_turns), 1e3),
        ttft_later_turns_ms=Spread.of((timing.ttft for timing in later_turns), 1e3),
        itl_ms=Spread.of((gap for timing in timings for gap in timing.gaps), 1e3),
        tpot_ms=Spread.of((timing.tpot for timing in timings if timing.tpot is not None), 1e3),
        e2e_ms=Spread.of((timing.e2e for timing in timings), 1e3),
        goodput_per_s=None if kept is None else kept / seconds,
        kept_slo=kept,
        failures=_failures(failed),
        client=_strain(measured, counted),
    )


def window(measured: Measured, counted: Sequence[RequestOutcome]) -> tuple[float, float]:
    """The measured time: as the level says, or from the first counted request to the end of the last."""
    level = measured.level
    begin, limit = measured.start + level.warmup_s, level.limit_s
    last = max((outcome.ended for outcome in counted), default=begin)
    if limit is not None:
        end = measured.start + limit
        return begin, min(end, last) if measured.stopped or level.conversations is not None else end
    return min((outcome.due for outcome in counted), default=begin), last


def _output_tokens(complete: Sequence[RequestOutcome], begin: float, end: float) -> float:
    """Tokens that came in the window; an event stands for its request's tokens per event."""
    total = 0.0
    for outcome in complete:
        inside = sum(begin <= at <= end for at in outcome.times())
        total += inside * outcome.tokens() / outcome.event_count()
    return total


def _cached(good: Sequence[RequestOutcome]) -> float | None:
    """Share of prompt tokens that the service says it had in its cache; None when it says nothing."""
    counted = [o for o in good if o.cached_tokens is not None and o.prompt_tokens]
    return _ratio(sum(o.cached_tokens or 0 for o in counted), sum(o.prompt_tokens or 0 for o in counted))


def _failures(failed: Sequence[RequestOutcome]) -> tuple[FailureGroup, ...]:
    counts = Counter((outcome.error, bool(outcome.events)) for outcome in failed)
    examples = {(outcome.error, bool(outcome.events)): outcome.detail for outcome in reversed(failed)}
    return tuple(FailureGroup(*key, count, examples[key]) for key, count in counts.most_common())


def _strain(measured: Measured, counted: Sequence[RequestOutcome]) -> ClientStrain:
    closed = measured.level.concurrency is not None
    cpu = max((strain.cpu for strain in measured.strains), default=0.0)
    late_ms = Spread.of((lag for strain in measured.strains for lag in strain.lags_s), 1e3)
    return ClientStrain(
        workers=len(measured.strains),
        cpu=cpu,
        machine_cpu=measured.machine_cpu,
        loop_late_ms=late_ms,
        sent_late_ms=None if closed else Spread.of((max(0.0, o.sent - o.due) for o in counted), 1e3),
        was_bottleneck=cpu > _BUSY,
        waited_for_a_core=late_ms is not None and late_ms.p99 > _LATE_MS,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
