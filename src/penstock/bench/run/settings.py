"""What the user wrote, checked before anything is sent, as the plan and the levels of a run."""

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.bench.load.arrivals import Level
from penstock.bench.load.conversations import RequestFormat, Workload
from penstock.bench.load.lengths import Length
from penstock.bench.load.target import Target
from penstock.bench.load.trace import Arrival, read_trace
from penstock.bench.run.figures import SLO
from penstock.bench.run.options import CONCURRENCY, INPUT, OUTPUT, SECONDS, WARMUP_S, BenchOptions
from penstock.errors import ConfigError

_STREAMS_PER_WORKER = 64
_RATE_PER_WORKER = 50


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """A run as it can be carried out, but for what `probe` finds out."""

    target: Target
    work: Workload
    levels: tuple[Level, ...]
    slo: SLO | None
    workers: int
    options: BenchOptions = field(repr=False)

    @classmethod
    def of(cls, options: BenchOptions) -> Self:
        """Raises: ConfigError."""
        _refuse_contradictions(options)
        target = Target.parse(options.url, options.api_key, verify=not options.insecure)
        trace = read_trace(options.trace, speed=options.trace_speed) if options.trace else ()
        levels = _levels(options)
        return cls(
            target=target,
            work=_work(options, trace),
            levels=levels,
            slo=SLO.parse(options.slo) if options.slo else None,
            workers=options.workers or _workers(levels, trace),
            options=options,
        )


def _refuse_contradictions(options: BenchOptions) -> None:
    loads = {"--concurrency": options.concurrency, "--rate": options.rate, "--trace": options.trace}
    _refuse_two(loads)
    _refuse_two({"--prompts": options.prompts, "--trace": options.trace, "--input": options.input})
    _refuse_two({"--output": options.output, "--trace": options.trace})
    _refuse_two({"--requests": options.requests, "--conversations": options.conversations})
    if options.turns > 1:
        _refuse_two({"--turns": options.turns, "--prompts": options.prompts, "--trace": options.trace})
    if options.shared_prefix:
        shared = {"--shared-prefix": options.shared_prefix}
        _refuse_two({**shared, "--prompts": options.prompts, "--trace": options.trace})
    if options.endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint {options.endpoint!r} is unknown; it is chat or completions.")


def _refuse_two(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; leave one out.")


def _work(options: BenchOptions, trace: tuple[Arrival, ...]) -> Workload:
    own = options.prompts is not None
    form = RequestFormat(
        model="",
        chat=options.endpoint == "chat",
        ignore_eos=(not own) if options.ignore_eos is None else options.ignore_eos,
        more=_object(options.body, "--body") if options.body else {},
    )
    output = options.output or (None if own else OUTPUT)
    return Workload(
        form=form,
        salt=secrets.token_hex(8),
        input=Length.parse(options.input or INPUT, "--input"),
        output=Length.parse(output, "--output") if output else None,
        turns=options.turns,
        shared_prefix=options.shared_prefix,
        prefixes=options.prefixes,
        seed=options.seed,
        bodies=_bodies(options.prompts, form) if options.prompts else (),
        trace=trace,
    )


def _bodies(path: Path, form: RequestFormat) -> tuple[bytes, ...]:
    """A file's requests, one JSON object a line."""
    needed = "messages" if form.chat else "prompt"
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompts {path} cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        if needed not in _object(line, f"{path}, line {number}:"):
            raise ConfigError(
                f"{path}, line {number}: has no {needed!r}; each line is the body of a request."
            )
    if not lines:
        raise ConfigError(f"{path} holds no request.")
    return tuple(line.encode() for line in lines)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'{where} must be a JSON object, like {{"temperature": 0}} ({error}).') from error


def _levels(options: BenchOptions) -> tuple[Level, ...]:
    count = options.conversations
    if options.requests is not None:
        count = math.ceil(options.requests / options.turns)
    seconds = options.seconds
    if seconds is None and count is None and not options.trace:
        seconds = SECONDS
    warmup = options.warmup
    if warmup is None:
        warmup = 0.0 if options.trace else WARMUP_S
    same: dict[str, Any] = {"warmup_s": warmup, "seconds": seconds, "conversations": count}
    if options.trace:
        return (Level(0, **same),)
    if options.rate is not None:
        rates = _numbers(options.rate, "--rate", float)
        return tuple(Level(i, rate=rate, steady=options.steady, **same) for i, rate in enumerate(rates))
    streams = _numbers(options.concurrency or CONCURRENCY, "--concurrency", int)
    return tuple(Level(i, concurrency=int(number), **same) for i, number in enumerate(streams))


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[float]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{option} {text!r} must be numbers above 0, like 8 or 1,16,64.")
    return list(numbers)


def _workers(levels: Sequence[Level], trace: tuple[Arrival, ...]) -> int:
    """Enough that none is busy with usual loads, and at most half of the cores."""
    needed = max(
        (level.concurrency or 0) / _STREAMS_PER_WORKER + (level.rate or 0) / _RATE_PER_WORKER
        for level in levels
    )
    if trace:
        needed = len(trace) / max(trace[-1].at_s, 1.0) / _RATE_PER_WORKER
    return max(1, min(math.ceil(needed), (os.cpu_count() or 2) // 2))
