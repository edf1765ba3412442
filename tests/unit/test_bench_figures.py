"""Figures of `penstock bench` on records made by hand."""

from array import array
from typing import Any

import numpy
import pytest

from penstock.bench.load.arrivals import Level
from penstock.bench.load.outcome import UNFINISHED, RequestOutcome, RequestTiming, pack, unpack
from penstock.bench.load.worker import WorkerStrain
from penstock.bench.load.workers import Measured
from penstock.bench.report.series import distributions, first_tokens, over_time
from penstock.bench.report.table import remarks
from penstock.bench.run.figures import SLO, Figures, Spread, figures

TEN_S = Level(0, concurrency=1, warmup_s=2.0, seconds=10.0)


def outcome(due: float, *events: float, tokens: int | None = -1, **more: Any) -> RequestOutcome:
    """An answer whose events came at these seconds; by default a token each."""
    fixed: dict[str, Any] = {
        "due": due,
        "sent": due,
        "ended": events[-1] if events else due + 1.0,
        "events": array("d", events).tobytes(),
        "asked_tokens": 0,
        "prompt_tokens": 100,
        "completion_tokens": len(events) if tokens == -1 else tokens,
        "counted": due >= 2.0,
    }
    return RequestOutcome(**{**fixed, **more})


def seen(*outcomes: RequestOutcome, level: Level = TEN_S, slo: str | None = None, **more: Any) -> Figures:
    measured = Measured(level, 0.0, list(outcomes), **more)
    return figures(measured, SLO.parse(slo) if slo else None)


def test_percentiles_are_those_of_numpy() -> None:
    values = [float(value) for value in numpy.random.default_rng(1).exponential(size=137)]
    spread = Spread.of(values)
    assert spread is not None
    expected = numpy.percentile(values, [50, 90, 95, 99])
    assert [spread.p50, spread.p90, spread.p95, spread.p99] == pytest.approx(list(expected))


def test_latencies_count_from_the_time_at_which_a_request_was_due() -> None:
    late = outcome(3.0, 5.0, 5.5, sent=4.5)
    assert RequestTiming.of(late).ttft == pytest.approx(2.0)
    assert RequestTiming.of(late).e2e == pytest.approx(2.5)


def test_merged_tokens_do_not_make_a_token_cheaper() -> None:
    one_by_one, merged = outcome(3, 4, 5, 6, 7, 8), outcome(3, 4, 8, tokens=5)
    assert RequestTiming.of(one_by_one).tpot == RequestTiming.of(merged).tpot == pytest.approx(1.0)
    assert seen(merged).tokens_per_event == pytest.approx(2.5)


def test_answer_of_one_token_has_a_ttft_and_no_gap() -> None:
    timing = RequestTiming.of(outcome(3, 4))
    assert (timing.ttft, timing.gaps, timing.tpot) == (1.0, [], None)


def test_only_what_was_due_in_the_measured_time_counts() -> None:
    found = seen(outcome(1.0, 1.5), outcome(3.0, 4.0))
    assert found.requests.good == 1
    assert found.ttft_ms is not None
    assert found.ttft_ms.max == pytest.approx(1000)


def test_rates_count_what_came_in_the_measured_time() -> None:
    found = seen(outcome(1.0, 1.5, 2.5, 3.5), outcome(11.0, 11.5, 12.5, 13.5))
    assert found.output_tokens_per_s == pytest.approx(3 / 10)
    assert found.input_tokens_per_s == pytest.approx(100 / 10)
    assert found.requests_per_s == pytest.approx(1 / 10)


def test_without_a_time_the_window_is_from_the_first_to_the_last() -> None:
    level = Level(0, concurrency=1, conversations=2)
    found = seen(outcome(3.0, 4.0, 5.0), outcome(5.0, 6.0, 7.0), level=level)
    assert found.seconds == pytest.approx(4.0)
    assert found.output_tokens_per_s == pytest.approx(1.0)


def test_broken_answers_are_failures_and_their_tokens_are_worth_nothing() -> None:
    found = seen(
        outcome(3.0, 4.0, 5.0),
        outcome(3.0, 4.0, 5.0, error="cut", detail="gone"),
        outcome(3.0, error="refused"),
        outcome(3.0, error="refused"),
    )
    assert (found.requests.good, found.requests.failed) == (1, 3)
    assert found.output_tokens_per_s == pytest.approx(2 / 10)
    told = [(failure.kind, failure.begun, failure.count) for failure in found.failures]
    assert told == [("refused", False, 2), ("cut", True, 1)]


def test_unfinished_requests_are_neither_good_nor_failed() -> None:
    found = seen(outcome(3.0, 4.0, error=UNFINISHED), stopped=True)
    assert (found.requests.good, found.requests.failed, found.requests.unfinished) == (0, 0, 1)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast, slow_start, stalls = outcome(3, 3.1, 3.2), outcome(3, 4.1, 4.2), outcome(3, 3.1, 5.1)
    found = seen(fast, slow_start, stalls, slo="ttft=200ms,itl=150ms")
    assert found.kept_slo == 1
    assert found.goodput_per_s == pytest.approx(1 / 10)


def test_failed_requests_are_no_goodput() -> None:
    assert seen(outcome(3, 3.1, error="cut"), slo="ttft=1s").kept_slo == 0


def test_one_gap_of_a_hundred_may_be_longer_than_the_limit() -> None:
    steady = [3.0 + 0.01 * i for i in range(101)]
    one, two = steady[:-1] + [9.0], steady[:-2] + [9.0, 15.0]
    assert seen(outcome(3, *one), slo="itl=20ms").kept_slo == 1
    assert seen(outcome(3, *two), slo="itl=20ms").kept_slo == 0


def test_without_usage_events_are_counted_and_it_is_said() -> None:
    found = seen(outcome(3, 4, 5, tokens=None))
    assert found.tokens_counted_by == "events"
    assert found.output_tokens_per_s == pytest.approx(2 / 10)


def test_cached_share_is_of_all_prompt_tokens() -> None:
    found = seen(outcome(3, 4, cached_tokens=0), outcome(3, 4, cached_tokens=50))
    assert found.cached_share == pytest.approx(0.25)


def test_later_turns_have_a_ttft_of_their_own() -> None:
    found = seen(outcome(3, 4), outcome(4, 4.25, turn=1))
    assert found.ttft_ms is not None
    assert found.ttft_later_turns_ms is not None
    assert (found.ttft_ms.p50, found.ttft_later_turns_ms.p50) == (pytest.approx(1000), pytest.approx(250))


def test_level_without_a_single_answer_has_figures_too() -> None:
    found = seen(outcome(3, error="status 500"), slo="ttft=1s")
    assert (found.requests.good, found.requests.failed, found.ttft_ms, found.goodput_per_s) == (
        0,
        1,
        None,
        0.0,
    )


def test_busy_or_starved_client_is_told() -> None:
    calm, busy, starved = (
        WorkerStrain(0.2, (0.0005,) * 9),
        WorkerStrain(0.95, ()),
        WorkerStrain(0.2, (0.05,) * 9),
    )
    assert remarks(seen(outcome(3, 4), strains=[calm])) == []
    assert "bottleneck" in remarks(seen(outcome(3, 4), strains=[calm, busy]))[0]
    assert "waited for a core" in remarks(seen(outcome(3, 4), strains=[starved]))[0]


def test_outcomes_survive_the_way_to_the_parent() -> None:
    outcomes = [outcome(3, 4, 5, turn=2, error="cut", detail="ü"), outcome(1, tokens=None)]
    assert unpack(pack(outcomes)) == outcomes


def test_series_put_everything_into_its_second() -> None:
    outcomes = [outcome(2.5, 3.1, 3.2, 5.9), outcome(2.0, error="cut", ended=4.5), outcome(0.5, 1.0)]
    measured = Measured(TEN_S, 0.0, outcomes)
    found = over_time(measured, figures(measured, None))
    assert found["at"] == pytest.approx([-1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    assert found["tokens_per_s"] == pytest.approx([0, 1, 0, 2, 0, 1])
    assert found["refused"] == [0, 0, 0, 0, 1, 0]
    assert found["open"] == [1, 0, 2, 2, 1, 1]
    assert found["itl_p50_ms"][3] == pytest.approx(100)


def test_sample_of_very_many_points_keeps_the_slowest() -> None:
    outcomes = [outcome(3 + i / 1e4, 4 + i / 1e4) for i in range(5000)] + [outcome(3.0005, 9.0)]
    measured = Measured(TEN_S, 0.0, outcomes)
    points = first_tokens(measured, figures(measured, None))
    assert len(points["at"]) < 2000
    assert max(points["ttft_ms"]) == pytest.approx(5999.5)


def test_distribution_ends_with_all_requests() -> None:
    measured = Measured(TEN_S, 0.0, [outcome(3, 4), outcome(3, 4), outcome(3, 5)])
    values, shares = distributions(measured)["ttft"]
    assert (values[-1], shares[-1]) == (2000, 100)
