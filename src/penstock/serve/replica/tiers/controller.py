"""How many batch requests may run in one replica: AIMD against the latencies of its online requests.

While online is well, the limit grows by a little at each tick; as soon as it is not, the limit is cut. Pure:
`share` calls it with what it sees. Every replica decides for itself, by its own engine's figures: no message
is needed, all gateways and jobs meet the same limit, and no death of another process changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from penstock.config import LLMConfig
from penstock.config.schema.sections import BatchConfig, SloConfig
from penstock.engine import Load

TICK_S = 0.02
"""Between two calls of `tick`."""

_UNKNOWN = 4.0  # the limit before anything is known
_STEP, _SHARE = 0.05, 0.002  # added at a tick: this, and this share of the limit
_FILL = 1.05  # times the limit at a tick while nothing is online
_CUT = 0.8
_SETTLE_S = 0.5  # a cut shows in latencies only after a while
_QUIET_S = 5.0  # without online requests, before batch takes what is left for them
_NEAR = 0.9  # of a target: no more growth
_AIM = 0.85  # of a target: the p99 of a few seconds varies around that of a minute
_FADE = 0.97  # a long time to first token counts less with each later one
_MOST_KV = 0.9
_HEADROOM = 16  # one seat of so many stays free for the next online requests
_LEARNED = 1.1  # online may take so much longer than alone
_FORGET = 0.01  # the share of the old in what is learned of online alone, at each first token


@dataclass(frozen=True, slots=True)
class Targets:
    """What online requests may take. Units: seconds; None to learn it from moments without batch.

    ttft_s: to the first token, in the replica. itl_s: between two tokens. min_share: of the engine's seats
    that batch has in any case, 0 to 1.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    min_share: float = 0.0


def targets(config: LLMConfig) -> Targets:
    """Those of a model's config."""
    slo, batch = config.slo or SloConfig(), config.batch or BatchConfig()
    ttft_s = slo.ttft_ms / 1e3 if slo.ttft_ms is not None else None
    return Targets(ttft_s, slo.itl_ms / 1e3 if slo.itl_ms is not None else None, batch.min_share)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a tick sees. online, batch: requests in the engine. wanted: whether batch requests wait.

    ttft_s: the longest of online requests that got their first token since the last tick; 0 for none.
    """

    online: int
    batch: int
    wanted: bool
    ttft_s: float
    load: Load


class Controller:
    """The limit of one replica."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._limit = self._safe = _UNKNOWN
        self._alone_ttft_s = self._alone_step_s = 0.0
        self._online_at = -inf
        self._settled_at = 0.0
        self._was_crowded = False
        self._ttft_s = self._step_s = 0.0
        self.gives_way = False
        """Whether batch requests over the limit must end now."""

    @property
    def limit(self) -> int:
        """Batch requests that may run."""
        return int(self._limit)

    def quiet(self, now: float) -> bool:
        """Whether nothing has been online for a while."""
        return now - self._online_at > _QUIET_S

    def learn(self, ttft_s: float, step_s: float) -> None:
        """What an online request took while no batch request ran."""
        self._alone_ttft_s = _envelope(self._alone_ttft_s, ttft_s)
        self._alone_step_s = _envelope(self._alone_step_s, step_s)

    def tick(self, sample: Sample, now: float) -> None:
        """Adapts the limit."""
        was_quiet = self.quiet(now)
        if sample.online:
            self._online_at = now
        if self.quiet(now):
            self._fill(sample)
            return
        self._adapt(sample, now)
        if was_quiet:  # online is back
            self._limit = min(self._limit, self._safe)
            self.gives_way = True
        seats = sample.load.seats
        if seats:  # some stay for those online and the next of them
            self._limit = min(self._limit, float(max(0, seats - sample.online - max(1, seats // _HEADROOM))))
        self._limit = self._safe = max(self._limit, self._targets.min_share * seats)

    def _adapt(self, sample: Sample, now: float) -> None:
        strain = self._strain(sample)
        self.gives_way = strain > 1
        if strain > 1:
            if now >= self._settled_at:
                self._limit = min(self._limit, float(sample.batch)) * _CUT
                self._settled_at = now + _SETTLE_S
        elif not self._near(sample.load) and sample.wanted and sample.batch >= self.limit:
            self._limit += _STEP + _SHARE * self._limit

    def _fill(self, sample: Sample) -> None:
        """Nothing is online: batch takes the engine, with a few waiting in it for the next step."""
        self.gives_way = False
        load = sample.load
        few = max(2, load.running // _HEADROOM)
        if load.waiting > 2 * few:
            self._limit = max(1.0, min(self._limit, float(sample.batch)) - 1)
        elif load.waiting < few and sample.wanted and sample.batch >= self.limit:
            self._limit = self._limit * _FILL + 1
        if load.seats:
            self._limit = min(self._limit, float(load.seats + max(2, load.seats // _HEADROOM)))

    def _strain(self, sample: Sample) -> float:
        """The largest ratio of what has just been seen to what is allowed: over 1, online is not well."""
        load = sample.load
        full = load.kv_usage > _MOST_KV or (load.seats and load.running >= load.seats)
        crowded = bool(load.waiting and full)
        twice, self._was_crowded = crowded and self._was_crowded, crowded
        rises, self._step_s = load.step_s > self._step_s, load.step_s
        if sample.ttft_s:
            self._ttft_s = max(sample.ttft_s, self._ttft_s * _FADE)
        return max(
            2.0 if twice else 0.0,
            load.kv_usage / _MOST_KV,
            sample.ttft_s / self._ttft_bounds()[1],
            load.step_s / self._step_bounds()[1] if rises else 0.0,
        )

    def _near(self, load: Load) -> bool:
        """Whether more batch would soon miss a target."""
        return self._ttft_s > self._ttft_bounds()[0] or load.step_s > self._step_bounds()[0]

    def _ttft_bounds(self) -> tuple[float, float]:
        return _bounds(self._targets.ttft_s, self._alone_ttft_s)

    def _step_bounds(self) -> tuple[float, float]:
        return _bounds(self._targets.itl_s, self._alone_step_s)


def _bounds(target_s: float | None, alone_s: float) -> tuple[float, float]:
    """Above the first the limit grows no more, above the second it is cut."""
    if target_s is not None:
        return target_s * _AIM * _NEAR, target_s * _AIM
    if alone_s:
        return alone_s * (1 + _LEARNED) / 2, alone_s * _LEARNED
    return inf, inf


def _envelope(known: float, new: float) -> float:
    """Follows the largest values at once, and smaller ones slowly."""
    return max(new, known + (new - known) * _FORGET)
