"""Tenants: keys by their hashes, limits that parallel requests cannot overshoot, usage counted once."""

from __future__ import annotations

import calendar
import heapq
import random
import sqlite3
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import GatewayConfig
from penstock.config.schema.tenants import (
    KeyConfig,
    KeysConfig,
    LimitsConfig,
    PriceConfig,
    TenantConfig,
    hashed,
)
from penstock.errors import BadRequest, Overloaded, QuotaExhausted, RateLimited
from penstock.serve.gateway.tenants.meter import Asked, RequestMeter
from penstock.serve.gateway.tenants.registry import Tenants
from penstock.serve.tenancy import limits
from penstock.serve.tenancy import store as stores
from penstock.serve.tenancy.keys import KeyTable, _digits, changes, new_key
from penstock.serve.tenancy.limits import Allowance, MinuteLimit, Periods, Rate, headers
from penstock.serve.tenancy.organization import page
from penstock.serve.tenancy.prices import PriceList, nano, shown
from penstock.serve.tenancy.store import UsageStore
from penstock.serve.tenancy.usage import Settlement, Totals, UsageCounters, UsageRow

NOON = calendar.timegm((2026, 11, 30, 12, 0, 0))
MIDNIGHT = calendar.timegm((2026, 12, 1, 0, 0, 0))
TODAY = Periods.at(NOON)


def allowance(**limited: float) -> Allowance:
    one = Allowance("search")
    one.limit(LimitsConfig(**limited))
    return one


@dataclass
class Open:
    """An open request of one allowance."""

    of: Allowance
    tokens: int
    begun: int
    cost: int = 0

    def settle(self, taken: int, second: int, today: Periods, cost: int = 0) -> None:
        limits.settle([self.of], (self.tokens, self.cost), (taken, cost), self.begun, second, today)


def reserve(one: Allowance, tokens: int, now: float, at: float = NOON, cost: int = 0) -> Open:
    limits.reserve([one], tokens, int(now), Periods.at(at), at, cost)
    return Open(one, tokens, int(now), cost)


def table(*keys: KeyConfig, **tenants: TenantConfig) -> KeyTable:
    found = KeyTable()
    found.replace(keys, tenants)
    return found


# -- keys


def test_a_key_has_256_random_bits_and_a_checksum():
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(key.startswith("pk_") and len(key) == 52 for key in keys)
    assert all(_digits(zlib.crc32(key[3:-6].encode()), 6) == key[-6:] for key in keys)


def test_only_the_whole_key_is_found_until_it_expires():
    key = new_key()
    found = table(KeyConfig(tenant="a", name="b", hash=hashed(key), expires=100.0))
    assert found.find(key.encode(), 99.9).name == "b"
    for wrong in (key[:-1], key + "x", key.lower(), "", hashed(key), hashed(key)[7:], f" {key}"):
        assert found.find(wrong.encode(), 99.9) is None
    assert found.find(b"\xff\xfe" * 40_000, 99.9) is None
    assert found.find(key.encode(), 100.0) is None


def test_counts_outlive_another_reading_of_the_keys():
    limited = LimitsConfig(tokens_per_minute=10)
    keys = [KeyConfig(tenant="a", name="b", hash=hashed("k" * 20), limits=limited)]
    found = table(*keys)
    reserve(found.allowances["a/b"], 5, 1.0)
    found.replace(keys, {"a": TenantConfig(limits=LimitsConfig(open_requests=1))})
    assert found.allowances["a/b"].tokens.used == 5
    assert found.allowances["a"].most_open == 1
    found.replace([], {})
    assert not found.allowances
    assert len(found) == 0


# -- limits for a minute


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), max_size=60))
def test_a_window_counts_what_the_last_minute_had(steps: list[tuple[int, int]]):
    window, second, counted = MinuteLimit(0), 0, []
    window.most = 1 << 40
    for gap, count in steps:
        second += gap
        window.move(second)
        window.reserved += count
        counted.append((second, count))
        assert window.used == sum(n for at, n in counted if at > second - 60)
        wait_s = window.wait_s(1, second)
        oldest = min(at for at, _ in counted if at > second - 60)
        assert second + wait_s == oldest + 60


def test_parallel_requests_cannot_overshoot_and_return_what_they_did_not_take():
    one = allowance(tokens_per_minute=1000)
    held = [reserve(one, 300, 5.0) for _ in range(3)]
    with pytest.raises(
        RateLimited, match="1000 tokens in a minute; it has had 900, and this would be 300"
    ) as no:
        reserve(one, 300, 6.0)
    assert no.value.facts["retry_after_s"] == 59
    held[0].settle(40, 7, TODAY)
    assert one.tokens.used == 640
    reserve(one, 300, 7.0)
    held[1].settle(500, 8, TODAY)  # it took more than it had reserved
    assert one.tokens.used == 40 + 500 + 300 + 300
    held[2].settle(0, 90, TODAY)  # too late to be returned: that minute is over
    assert (one.tokens.used, one.open) == (0, 1)


@pytest.mark.parametrize("added", [{"requests_per_minute": 2}, {"tokens_per_minute": 20}])
def test_a_limit_that_comes_later_counts_nothing_of_before(added: dict[str, int]):
    one = allowance(open_requests=9)
    for second in range(100):
        reserve(one, 10, second).settle(10, second, TODAY)
    one.limit(LimitsConfig(open_requests=9, **added))
    for _ in range(2):
        reserve(one, 10, 200.0).settle(10, 200, TODAY)
    with pytest.raises(RateLimited, match="it has had 2"):
        reserve(one, 10, 201.0)
    one.limit(LimitsConfig(open_requests=9))
    reserve(one, 10, 201.0).settle(10, 201, TODAY)


def test_what_was_asked_for_without_a_limit_is_returned():
    one = allowance(requests_per_minute=100)
    for second in range(0, 20, 2):
        reserve(one, limits.NO_LIMIT >> 2, second).settle(0, second + 1, TODAY)
    assert (one.requests.used, one.tokens.used, one.tokens.open) == (10, 0, 0)


def test_a_long_stream_is_charged_what_exceeds_its_reservation_now():
    one = allowance(tokens_per_minute=1000)
    long = reserve(one, 100, 0.0)
    long.settle(700, 100, TODAY)
    assert one.tokens.used == 600


def test_no_account_is_charged_when_one_refuses():
    key, tenant = allowance(requests_per_minute=5), allowance(requests_per_minute=1)
    limits.reserve([key, tenant], 1, 0, TODAY, NOON)
    with pytest.raises(RateLimited):
        limits.reserve([key, tenant], 1, 0, TODAY, NOON)
    assert (key.requests.used, key.open, tenant.open) == (1, 1, 1)


def test_open_requests_are_limited():
    one = allowance(open_requests=2)
    first, _ = reserve(one, 0, 0.0), reserve(one, 0, 0.0)
    with pytest.raises(RateLimited, match="2 open requests"):
        reserve(one, 0, 0.0)
    first.settle(0, 1, TODAY)
    reserve(one, 0, 1.0)


@pytest.mark.parametrize("span", ["minute", "day", "month"])
def test_what_can_never_pass_is_not_to_be_tried_again(span: str):
    one = allowance(**{f"tokens_per_{span}": 100, "requests_per_minute": 1})
    reserve(one, 100, 0.0)  # what will pass later is no reason to wait for the other
    with pytest.raises(RateLimited, match=f"may have 100 tokens a {span}: it can never run") as refused:
        reserve(one, 101, 0.0)
    assert refused.value.facts == {"should_retry": "false"}


def test_the_headers_say_what_a_refusal_goes_by():
    key, tenant = allowance(requests_per_minute=10, tokens_per_minute=500), allowance(requests_per_minute=3)
    assert dict(headers([key, tenant], 0))[b"x-ratelimit-reset-tokens"] == b"0s"
    limits.reserve([key, tenant], 60, 10, TODAY, NOON)
    shown = {name.removeprefix(b"x-ratelimit-"): value for name, value in headers([key, tenant], 12)}
    assert shown == {
        b"limit-requests": b"3",
        b"remaining-requests": b"2",
        b"reset-requests": b"58s",
        b"limit-tokens": b"500",
        b"remaining-tokens": b"440",
        b"reset-tokens": b"58s",
    }
    assert headers([allowance(max_tokens=5)], 0) == []


def test_another_reading_of_the_keys_takes_no_cap_back():
    one = allowance(requests_per_minute=100)
    one.share(2, (70, 0))
    one.limit(LimitsConfig(requests_per_minute=100, open_requests=9))
    assert (one.requests.room, one.is_shared) == (70, True)
    one.limit(LimitsConfig(requests_per_minute=1000))
    assert (one.requests.room, one.is_shared) == (15, False)
    one.share_equally(is_shrinking=True)
    assert one.requests.fits(900)  # a first one begins, whatever the part
    one.share(1, None)
    assert one.requests.room == 1000


# -- days and months


@pytest.mark.parametrize("year", [1970, 1999, 2000, 2024, 2026, 2100])
def test_months_follow_each_other(year: int):
    begins = [calendar.timegm((year, month, 1, 0, 0, 0)) for month in range(1, 13)]
    for begin, end in zip(begins, [*begins[1:], calendar.timegm((year + 1, 1, 1, 0, 0, 0))], strict=True):
        for at in (begin, end - 0.5):
            assert (Periods.at(at).month_begins, Periods.at(at).month_ends) == (begin, end)


def test_a_budget_ends_with_its_day_and_its_month():
    one = allowance(tokens_per_day=100, tokens_per_month=150)
    reserve(one, 90, 0.0).settle(100, 1, TODAY)
    with pytest.raises(QuotaExhausted, match="of today") as refused:
        reserve(one, 1, 2.0)
    assert refused.value.facts == {"retry_after_s": 43_200, "should_retry": "false"}
    reserve(one, 60, 3.0, MIDNIGHT - 0.001 + 0.001).settle(60, 4, Periods.at(MIDNIGHT))
    assert (one.day.used(Periods.at(MIDNIGHT).day), one.month.used(Periods.at(MIDNIGHT).month)) == (60, 60)
    fresh = allowance(tokens_per_month=150)
    reserve(fresh, 150, 0.0, MIDNIGHT - 0.5).settle(150, 0, Periods.at(MIDNIGHT - 0.1))
    with pytest.raises(QuotaExhausted, match="of this month"):
        reserve(fresh, 1, 0.4, MIDNIGHT - 0.1)
    reserve(fresh, 1, 0.6, MIDNIGHT)


def test_a_clock_that_is_set_back_forgets_no_day():
    one = allowance(tokens_per_day=100)
    reserve(one, 80, 0.0, MIDNIGHT - 1).settle(80, 0, Periods.at(MIDNIGHT - 1))
    reserve(one, 50, 1.0, MIDNIGHT + 1).settle(50, 1, Periods.at(MIDNIGHT + 1))
    with pytest.raises(QuotaExhausted, match="has used 80"):
        reserve(one, 30, 2.0, MIDNIGHT - 1)
    with pytest.raises(QuotaExhausted, match="has used 50"):
        reserve(one, 60, 3.0, MIDNIGHT + 1)


# -- money


def test_costs_are_exact_to_the_nano_unit_whatever_is_summed():
    given = {"m": PriceConfig(input=0.1, cached_input=0.0125, output=0.7, audio_second=0.0001, image=0.002)}
    price = PriceList({**given, "m:legal": PriceConfig(input=1)}).find("m", "other")
    assert price.cost(1_000_000, 0, 0) == 100_000_000
    assert price.cost(1_000_000, 1_000_000, 1_000_000, 10) == 12_500_000 + 700_000_000 + 1_000_000
    assert price.cost(10, 0, 0, images=3) == 1000 + 6_000_000
    assert sum(price.cost(1, 0, 0) for _ in range(1_000_000)) == 100_000_000
    assert price.cost(10, 500, 0) == price.cost(10, 10, 0)  # whatever an engine reports
    found = PriceList({**given, "m:legal": PriceConfig(input=1)})
    assert found.find("m", "legal").cost(1, 0, 0) == 1000
    assert found.find("n", "") is None
    assert found.dearest(["m", "n"], 1_000_000, 0, 0) == 100_000_000
    assert (nano(12.3), shown(nano(12.3)), shown(nano(80)), shown(0)) == (12_300_000_000, "12.3", "80", "0")


def test_a_version_costs_what_its_model_does_unless_it_has_a_price():
    given = {"m": 1, "m:legal": 2, "m@c": 3, "m@c:legal": 4, "n@b": 5}
    found = PriceList({name: PriceConfig(input=price) for name, price in given.items()})
    for model, adapter, price in (
        *(("m", "", 1), ("m@b", "", 1), ("m@b", "legal", 2), ("m@b", "other", 1), ("n@b", "legal", 5)),
        *(("m@c", "", 3), ("m@c", "legal", 4), ("m@c", "other", 3)),
    ):
        assert found.find(model, adapter).cost(1_000_000, 0, 0) == nano(price)
        assert adapter or found.dearest([model], 1_000_000, 0, 0) == nano(price)
    assert found.find("n", "") is None


def test_the_smallest_budget_is_one():
    assert allowance(cost_per_month=1e-12).cost.most == 1


def test_a_budget_is_reserved_settled_and_ends_with_the_month(caplog: pytest.LogCaptureFixture):
    one = allowance(cost_per_month=1.0, warn_cost_per_month=0.5)
    with pytest.raises(
        RateLimited, match=r"to a cost of 1\.5, and 'search' may have a cost of 1 a month: it can never"
    ):
        reserve(one, 1, 0.0, cost=nano(1.5))
    first, second = (reserve(one, 1, 0.0, cost=nano(0.4)) for _ in range(2))
    with pytest.raises(QuotaExhausted, match=r"has used 0\.8 of its 1 budget of this month") as refused:
        reserve(one, 1, 0.0, cost=nano(0.3))
    assert refused.value.facts == {"retry_after_s": 43_200, "should_retry": "false"}
    first.settle(1, 1, TODAY, nano(0.4))
    assert headers([one], 1) == []
    assert not caplog.text
    second.settle(1, 1, TODAY, nano(0.1))
    assert headers([one], 1) == [(b"x-penstock-budget", b"search; spent=0.5; soft=0.5; limit=1")]
    reserve(one, 1, 2.0, cost=nano(0.5)).settle(1, 2, TODAY, nano(0.2))
    assert caplog.text.count("'search' has spent 0.5 this month, its soft line is 0.5.") == 1
    reserve(one, 1, 2.0, MIDNIGHT, nano(1.0))
    assert headers([one], 2) == []


@pytest.mark.parametrize(("before", "meanwhile"), [({}, {"cost_per_month": 1}), ({"cost_per_month": 1}, {})])
def test_a_budget_that_comes_or_goes_keeps_nothing_of_open_requests(
    before: dict[str, float], meanwhile: dict[str, float]
):
    one = allowance(open_requests=9, **before)
    request = reserve(one, 10, 7.0, cost=nano(0.9))
    one.limit(LimitsConfig(open_requests=9, **meanwhile))
    request.settle(10, 9, TODAY, nano(0.4))
    one.limit(LimitsConfig(cost_per_month=1))
    reserve(one, 10, 10.0, cost=nano(0.6)).settle(10, 10, TODAY, nano(0.6))
    with pytest.raises(QuotaExhausted):
        reserve(one, 10, 11.0, cost=nano(0.5))


def test_a_soft_line_alone_refuses_nothing():
    one = allowance(warn_cost_per_month=0.5)
    reserve(one, 1, 0.0, cost=nano(7)).settle(1, 1, TODAY, nano(7))
    assert headers([one], 1) == [(b"x-penstock-budget", b"search; spent=7; soft=0.5")]


# -- usage


class Process:
    """A gateway as far as usage goes. Its settlements reach the store, or do not."""

    def __init__(self, store: UsageStore, **limited: float) -> None:
        self.store, self.counters, self.clock = store, UsageCounters(), 0.0
        self.keys = table(
            KeyConfig(tenant="a", name="k", hash=hashed("k" * 20), limits=LimitsConfig(**limited))
        )
        self.allowance = self.keys.allowances.get("a/k")

    def use(self, tokens: int, at: float = NOON, cost: int = 0) -> None:
        today, second = Periods.at(at), int(self.clock)
        limited = [one for one in self.keys.allowances.values() if one.is_limited]
        limits.reserve(limited, tokens, second, today, at, cost)
        limits.settle(limited, (tokens, cost), (tokens, cost), second, second, today)
        row = self.counters.row("a", "k", "m", "", "default", at)
        row.requests += 1
        row.add(0, 0, tokens, 0, 0, cost)

    def settle(self, at: float = NOON, *, answered: bool = True) -> None:
        totals = self.store.settle(self.counters.settlement(self.keys.allowances, self.clock), at)
        if answered:
            self.counters.settled(totals, self.keys.allowances)


@pytest.fixture
def store(tmp_path: Path):
    found = UsageStore(tmp_path / "usage" / "a.sqlite")
    yield found
    found.close()


def used(store: UsageStore, *by: str) -> list[dict[str, object]]:
    return store.usage(by, NOON - 7200, MIDNIGHT + 7200)


def test_random_losses_of_answers_count_nothing_twice(store: UsageStore):
    processes = [Process(store) for _ in range(3)]
    draw, spent = random.Random(1), 0
    for _ in range(300):
        one = draw.choice(processes)
        tokens = draw.randrange(100)
        one.use(tokens)
        spent += tokens
        if draw.random() < 0.3:
            one.settle(answered=draw.random() < 0.5)
    for one in processes:
        one.settle()
        one.settle()
    assert used(store)[0]["output_tokens"] == spent
    assert used(store)[0]["requests"] == 300


def test_a_new_process_and_another_gateway_know_what_is_left_of_a_budget(store: UsageStore):
    first, second = Process(store, tokens_per_day=100), Process(store, tokens_per_day=100)
    first.settle()
    second.settle()
    first.use(70)
    first.settle(answered=False)  # the store has it; the process will send it again
    second.use(20)
    second.settle()
    assert second.allowance.day.used(TODAY.day) == 90
    first.settle()
    assert first.allowance.day.used(TODAY.day) == 90
    for one in (first, second):  # what was spent of a budget is known, too
        one.allowance.limit(LimitsConfig(cost_per_month=1.0))
        one.use(1, cost=nano(0.3))
        one.settle()
    first.settle()  # without a request of its own
    with pytest.raises(QuotaExhausted, match=r"has used 0\.6 of its 1 budget"):
        first.use(1, cost=nano(0.5))
    assert used(store)[0]["cost"] == nano(0.6)
    later = Process(store, tokens_per_day=100)
    later.settle()
    with pytest.raises(QuotaExhausted, match="has used 92"):
        later.use(11)
    later.settle(MIDNIGHT)
    later.use(100, MIDNIGHT)


async def test_what_was_used_of_a_budget_is_known_when_it_is_added(store: UsageStore):
    keys = [KeyConfig(tenant="a", name="k", hash=hashed("k" * 20))]

    async def settle(settlement: Settlement) -> Totals:
        return store.settle(settlement)

    tenants = Tenants(GatewayConfig(keys=keys), settle)
    await tenants.start()
    tenants.add_rows("a", "k", ["m"], UsageRow(1, output_tokens=60))
    await tenants.usage._send()
    a = TenantConfig(limits=LimitsConfig(tokens_per_month=50))
    tenants.follow(GatewayConfig(keys=keys, tenants={"a": a}), (KeysConfig(), None))
    await tenants.usage._send()
    assert tenants.add_rows("a", "k", ["m"], UsageRow())
    await tenants.close()


def test_usage_is_summed_by_what_is_asked_for(store: UsageStore):
    rows = [
        ((NOON // 3600, "a", "k1", "m", "", "default"), UsageRow(1, 10, 5, 7, 0)),
        ((NOON // 3600, "a", "k2", "m", "x", "flex"), UsageRow(2, 20, 0, 3, 1)),
        ((MIDNIGHT // 3600, "b", "k1", "n", "", "default"), UsageRow(4, 1, 1, 1, 0)),
    ]
    store.settle(Settlement("p", 1, rows), NOON)
    by_tenant = {one["tenant"]: one for one in used(store, "tenant")}
    assert list(by_tenant["a"].values()) == ["a", 3, 30, 5, 10, 1, 0, 0, 0, 0]
    assert [(one["day"], one["model"], one["requests"]) for one in used(store, "day", "model")] == [
        ("2026-11-30", "m", 3),
        ("2026-12-01", "n", 4),
    ]
    assert store.usage(["tenant"], MIDNIGHT, MIDNIGHT + 1)[0]["tenant"] == "b"
    with pytest.raises(BadRequest, match="there are tenant, key"):
        used(store, "tenant; DROP TABLE usage")


def test_a_store_without_a_disk_works_in_memory(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store = UsageStore(tmp_path / "file" / "a.sqlite")
    Process(store).settle()
    store.close()


def test_a_locked_file_takes_what_was_counted_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(stores, "_LOCKED_S", 0.01)
    monkeypatch.setattr(stores, "_STILL_LOCKED_S", 0.01)
    file = tmp_path / "a.sqlite"
    UsageStore(file).close()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store = UsageStore(file)
    store.note("somebody", "did this")
    one = Process(store)
    one.use(5)
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            one.settle()
    other.rollback()
    one.settle()
    one.use(2)
    one.settle()
    assert used(store)[0]["output_tokens"] == 7
    assert "kept by gateways" in caplog.text
    assert "lacks 'somebody: did this'" in caplog.text
    store.close()
    assert used(UsageStore(file))[0]["output_tokens"] == 7


def test_a_later_process_reads_what_is_on_disk(tmp_path: Path):
    file = tmp_path / "a.sqlite"
    first = UsageStore(file)
    for name in ("refused", "cost", "audio_seconds", "images"):  # of an earlier version
        first._connection.execute(f"ALTER TABLE usage DROP COLUMN {name}")
    first.close()
    first = UsageStore(file)
    one = Process(first)
    one.use(5)
    one.settle()
    first.close()
    second = UsageStore(file)
    assert used(second)[0]["output_tokens"] == 5
    second.close()
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(sqlite3.ProgrammingError):
        second.settle(Settlement("p", 1, []))


def metered(asked: Asked) -> RequestMeter:
    keys = table(KeyConfig(tenant="a", name="k", hash=hashed("k" * 20)))
    grant = keys.find(b"k" * 20, 0.0)
    assert grant is not None
    return RequestMeter(grant, asked, 0.0, (266, 0), 0, "", "default")


def test_a_stream_that_reports_its_usage_all_the_time_is_not_kept():
    meter = metered(Asked(10, None, streams=True))
    meter.stream(b'data: {"message":{"usage":{"input_tokens":9,"cache_read_input_tokens":4}}}\n\n')
    for tokens in range(1, 2001):
        meter.stream(b'data: {"usage":{"output_tokens":%d}%s}\n\n' % (tokens, b" " * 900))
    assert meter.tokens(answered=True) == (13, 4, 2000, 0, 0)
    assert sum(map(len, meter._found)) < 4096


@pytest.mark.parametrize(
    "repeated",
    [
        b'"user":"usage"',  # of Responses
        b'"prompt_logprobs":[null,{"7":{"logprob":-1.5,"rank":1,"decoded_token":"usage"}}]',  # of chat
        b'"metadata":{"usage":"0"},"top_logprobs":[{"usage":-0.5}]',
    ],
)
def test_what_an_answer_repeats_of_its_request_hides_no_usage(repeated: bytes):
    answer = b'{"output":[],"usage":{"input_tokens":9,"output_tokens":4000},%b}' % repeated
    for size in (*range(1, 20), len(answer)):
        whole = metered(Asked(10, 5000))
        for at in range(0, len(answer), size):
            whole.whole(answer[at : at + size])
        assert whole.tokens(answered=True) == (9, 0, 4000, 0, 0)
    stream = metered(Asked(10, 5000, streams=True))
    stream.stream(b'data: {"response":{"usage":null,%b}}\n\n' % repeated)
    stream.stream(b'data: {"response":%b}\n\n' % answer)
    assert stream.tokens(answered=True) == (9, 0, 4000, 0, 0)


def test_an_answer_in_the_background_has_no_usage_whatever_its_tools_are():
    meter = metered(Asked(10, 5000))
    meter.whole(b'{"tools":[{"usage":{"input_tokens":1,"output_tokens":1}}],')
    meter.whole(b'"usage":null,"user":"usage"}')
    assert meter.tokens(answered=True) == (10, 0, 256, 0, 0)


# -- as OpenAI's clients read it


def test_pages_of_usage_have_every_bucket_and_what_is_asked_for(store: UsageStore):
    hour = NOON // 3600
    rows = [
        ((hour, "a", "k1", "m", "", "default"), UsageRow(1, 10, 5, 7, 0, 0, 0, 3)),
        ((hour, "a", "k1", "m", "", "flex"), UsageRow(2, 20, 0, 8, 0, 0, 0, 4)),
        ((hour + 30, "B", "k2", "m", "x", "default"), UsageRow(4, 1, 0, 1)),
        ((hour + 30, "B", "k2", "e", "", "default"), UsageRow(5, 50)),
        ((hour + 30, "B", "k2", "w", "", "default"), UsageRow(6, 0, 0, 9, audio_seconds=60)),
    ]
    store.settle(Settlement("p", 1, rows), NOON)

    def ask(kind: str, **query: object) -> list[list[tuple[object, ...]]]:
        given = {
            name: [str(one) for one in value] if isinstance(value, list) else [str(value)]
            for name, value in query.items()
        }
        shown = page(
            kind, {"start_time": [str(NOON)], "end_time": [str(MIDNIGHT + 2 * 86_400)]} | given, store.usage
        )
        wanted = (
            "num_model_requests",
            "input_tokens",
            "output_tokens",
            "seconds",
            *given.get("group_by", ()),
        )
        return [
            [tuple(one[name] for name in wanted if name in one) for one in bucket["results"]]
            for bucket in shown["data"]
        ]

    assert ask("usage/completions") == [[(3, 30, 15)], [(4, 1, 1)], []]
    assert ask("usage/completions", group_by=["batch", "model"])[0] == [
        (1, 10, 7, False, "m"),
        (2, 20, 8, True, "m"),
    ]
    assert ask("usage/completions", batch="true", models=["m"]) == [[(2, 20, 8)], [], []]
    assert ask("usage/completions", models=["m:x"], bucket_width="1h", limit=31)[30] == [(4, 1, 1)]
    assert ask("usage/embeddings", project_ids=["B"])[1] == [(5, 50)]
    assert ask("usage/audio_transcriptions")[1] == [(6, 60)]
    first = page(
        "costs", {"start_time": [str(NOON)], "end_time": [str(MIDNIGHT + 1)], "limit": ["1"]}, store.usage
    )
    (bucket,) = first["data"]
    assert (bucket["start_time"], bucket["end_time"]) == (MIDNIGHT - 86_400, MIDNIGHT)
    assert [one["amount"]["value"] for one in bucket["results"]] == [7e-9]
    assert (first["has_more"], first["next_page"]) == (True, str(MIDNIGHT))
    later = page(
        "costs",
        {"start_time": [str(NOON)], "end_time": [str(MIDNIGHT + 1)], "page": [str(MIDNIGHT)]},
        store.usage,
    )
    assert ([one["start_time"] for one in later["data"]], later["has_more"]) == ([MIDNIGHT], False)
    for wrong in (
        {"start_time": "soon"},
        {"limit": 32},
        {"group_by": ["line_item"]},
        {"user_ids": ["u"]},
        {"page": "x"},
    ):
        with pytest.raises(BadRequest):
            ask("usage/completions", **wrong)


# -- audit


def test_changes_of_keys_and_tenants_are_said_without_secrets():
    one, two = (KeyConfig(tenant="a", name="b", hash=hashed(letter * 20)) for letter in "kl")
    limited = one.model_copy(update={"limits": LimitsConfig(requests_per_minute=5)})
    before = KeysConfig(keys=[one], tenants={"t": TenantConfig(weight=2.0)})
    after = KeysConfig(keys=[limited, two], tenants={"u": TenantConfig(weight=2.0)})
    ids = [key.hash[7:15] for key in (one, two)]
    assert changes(before, before) == []
    assert changes(before, after) == [
        f'key a/b ({ids[0]}) changed: {{"limits":{{"requests_per_minute":5}}}}',
        "tenant t removed",
        f"key a/b ({ids[1]}) added: {{}}",
        'tenant u added: {"weight":2.0}',
    ]
    assert one.hash not in str(changes(before, after))
    many = [KeyConfig(tenant="a", name=f"k{i}", hash=hashed(f"{i:020}")) for i in range(150)]
    assert changes(KeysConfig(), KeysConfig(keys=many))[-1] == "50 more keys and tenants"


def test_the_audit_log_is_append_only_and_has_what_gateways_notice_once(store: UsageStore):
    for source, number in (("p", 1), ("p", 1), ("q", 1)):
        store.settle(Settlement(source, number, [], changes=[("keys.yaml (root)", "key a/b added")]), NOON)
    store.note("the admin key", "sleep of m")
    store.note("the admin key", "sleep of m")
    assert [(one["who"], one["what"]) for one in store.audit()] == [
        ("the admin key", "sleep of m"),
        ("the admin key", "sleep of m"),
        ("keys.yaml (root)", "key a/b added"),
    ]
    for words in ("DELETE FROM audit", "UPDATE audit SET who = 'nobody'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store._connection.execute(words)


# -- several gateways


def test_a_new_control_takes_what_a_gateway_has_counted_of_a_limit_that_nobody_asks_for(store: UsageStore):
    for number, source in enumerate(("a", "b", "a"), 1):
        totals = store.settle(Settlement(source, number, [], {"search": (Rate(100, 20, 0), Rate(100, 0, 0))}))
    assert totals.gateways == 2
    assert 20 < totals.caps["search"][0] <= 80


@pytest.mark.parametrize("loads", [(1, 1, 1), (4, 1, 0), (3, 0, 0)])
def test_three_gateways_keep_a_limit_and_use_it(store: UsageStore, patched, loads: tuple[int, ...]):
    """At most 3 % more than the limit in any minute, and at least 95 % of it in five. loads: how much is
    asked of each gateway, which later moves to the next one.
    """
    limit, size, seconds = 60_000, 100, 300
    gateways = [Process(store, tokens_per_minute=limit) for _ in loads]
    clock = 1000.0
    patched(time, "monotonic", lambda: clock)
    for one in gateways:
        one.clock = clock
        one.settle()
        one.settle()
    passed = [0] * seconds
    for tenth in range(seconds * 10):
        clock = 1000.0 + tenth / 10
        for i, one in enumerate(gateways):
            one.clock = clock
            load = loads[(i + (tenth > 1500)) % 3]
            for _ in range(load):
                try:
                    one.use(size)
                except Overloaded:
                    continue
                passed[tenth // 10] += size
            if tenth % 10 == 3 * i:
                one.settle()
    minutes = [sum(passed[start : start + 60]) for start in range(seconds - 59)]
    assert max(minutes) <= 1.03 * limit
    assert sum(passed) >= 0.95 * 5 * limit


@pytest.mark.parametrize("back", [125, 220])
def test_a_limit_outlives_the_control_that_shares_it(tmp_path: Path, store: UsageStore, patched, back: int):
    """After a while without, all gateways take an equal part, which the one that had all gives up before."""
    limit, size, away, seconds, clock = 60_000, 100, 120, 340, 1000.0
    gateways = [Process(store, tokens_per_minute=limit) for _ in range(3)]
    patched(time, "monotonic", lambda: clock)
    for one in gateways:
        one.clock = clock
        one.settle()
    passed = [[0] * seconds for _ in gateways]
    new = UsageStore(tmp_path / "new.sqlite")
    for tenth in range(seconds * 10):
        clock = 1000.0 + tenth / 10
        for i, (one, had) in enumerate(zip(gateways, passed, strict=True)):
            one.clock = clock
            for _ in range(4 if i == 0 or tenth > away * 10 else 0):
                with suppress(Overloaded):
                    one.use(size)
                    had[tenth // 10] += size
            if tenth % 10 == 3 * i:
                one.store = store if tenth < away * 10 else new
                if away * 10 <= tenth < back * 10:
                    one.counters.unanswered(tenth / 10 - away, one.keys.allowances)
                else:
                    one.settle()
    new.close()
    minutes = [sum(sum(had[begin : begin + 60]) for had in passed) for begin in range(seconds - 59)]
    assert max(minutes) <= 1.03 * limit
    assert sum(sum(had[-60:]) for had in passed) >= 0.95 * limit
    if back > away + 90:
        assert min(sum(had[back - 60 : back]) for had in passed) >= 0.95 * limit / 3


@pytest.mark.parametrize("sizes", [(18, 18, 18, 18), (54, 54), (30, 0.05, 0.05)])
def test_gateways_keep_a_limit_for_requests_that_are_larger_than_their_parts(
    store: UsageStore, patched, sizes: tuple[float, ...]
):
    """Of 60, asked for again as clients do: all but the first, which each may begin with. All have turns."""
    seconds, clock = 240, 1000.0
    patched(time, "monotonic", lambda: clock)
    gateways = [Process(store, tokens_per_minute=60_000) for _ in sizes]
    passed = [[0] * seconds for _ in sizes]
    for one in (*gateways, *gateways):
        one.clock = clock
        one.settle()
    for half in range(seconds * 2):
        clock = 1000.0 + half / 2
        for one, size, had in zip(gateways, sizes, passed, strict=True):
            one.clock = clock
            with suppress(Overloaded):
                one.use(round(size * 1000))
                had[half // 2] += round(size * 1000)
            if half % 2:
                one.settle()
    minutes = [sum(sum(had[begin : begin + 60]) for had in passed) for begin in range(61, seconds - 59)]
    assert max(minutes) <= 1.03 * 60_000
    assert sum(sum(had[61:]) for had in passed) >= 0.6 * 60_000 * (seconds - 61) / 60
    assert all(sum(had[61:]) > 0 for had in passed)


@pytest.mark.parametrize("is_gateway", [True, False])
def test_an_idle_process_hears_what_others_have_used_whoever_wrote_it(tmp_path: Path, is_gateway: bool):
    """Also when an answer was lost, and while two controls write."""
    store, other = UsageStore(tmp_path / "a.sqlite"), UsageStore(tmp_path / "a.sqlite")
    idle, busy = Process(store, tokens_per_day=1000), Process(store, tokens_per_day=1000)
    idle.counters = UsageCounters(is_gateway=is_gateway)  # else it is that of batches
    idle.settle()
    for count, (through, answered) in enumerate(
        ((store, True), (other, True), (store, False), (store, True))
    ):
        busy.store = through
        busy.use(10)
        busy.settle()
        idle.settle(answered=answered)
        known = idle.allowance.day.used(TODAY.day)
        assert known == 10 * (count + 1) if answered else known == 20
    for one in (store, other):
        one.close()


@pytest.mark.parametrize(
    ("limited", "rows"),
    [({"tokens_per_day": 100}, 4), ({"cost_per_month": 0.3}, 2), ({"open_requests": 1}, 9)],
)
async def test_rows_of_a_batch_are_charged_until_a_budget_is_used_up(limited: dict[str, float], rows: int):
    config = GatewayConfig(
        keys=[KeyConfig(tenant="a", name="k", hash=hashed("k" * 20))],
        tenants={"a": TenantConfig(limits=LimitsConfig(**limited))},
        prices={"m": PriceConfig(output=5000)},
    )
    tenants = Tenants(config, None)
    await tenants.start()
    used_up = [tenants.add_rows("a", "k", ["m"], UsageRow(1, output_tokens=20)) for _ in range(9)]
    assert used_up == [number > rows for number in range(1, 10)]
    (row,) = tenants.usage.counters._rows.values()
    assert (row.requests, row.output_tokens, row.cost) == (9, 180, nano(0.9))
    await tenants.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_over_three_gateways_keep_a_limit_and_use_it(store: UsageStore, patched, seed: int):
    """As above, of requests that take less than they reserve, and end later; far more is asked than may run.
    When one is refused, all gateways have counted 95 % of the limit, but for the first second or two.
    """
    limit, seconds, draw = 60_000, 300, random.Random(seed)
    clock = 1000.0
    patched(time, "monotonic", lambda: clock)

    def start() -> Process:
        made = Process(store, tokens_per_minute=limit)
        made.clock = clock
        made.settle()
        made.settle()
        return made

    gateways = [start() for _ in range(3)]
    shares = [draw.uniform(0.2, 1) for _ in gateways]
    open_: list[tuple[float, int, Process, Open]] = []
    taken, used, asked = [0] * seconds, list[int](), 0
    for tenth in range(seconds * 10):
        clock = 1000.0 + tenth / 10
        while open_ and open_[0][0] <= clock:
            _, _, one, request = heapq.heappop(open_)
            took = round(request.tokens * draw.uniform(0.8, 1))
            request.settle(took, int(clock), TODAY)
            taken[request.begun - 1000] += took
        for i, one in enumerate(gateways):
            one.clock = clock
            for _ in range(4):
                if draw.random() < shares[i]:
                    tokens = round(draw.uniform(20, 180))
                    try:
                        request = reserve(one.allowance, tokens, clock)
                    except Overloaded:
                        if tenth % 10 == 9:
                            used.append(sum(other.allowance.tokens.used for other in gateways))
                        continue
                    asked += 1
                    heapq.heappush(open_, (clock + draw.expovariate(0.5), asked, one, request))
            if tenth % 10 == 3 * i:
                one.settle()
    for *_, request in open_:
        taken[request.begun - 1000] += request.tokens
    minutes = [sum(taken[begin : begin + 60]) for begin in range(seconds - 59)]
    assert max(minutes) <= 1.03 * limit
    assert sum(taken) >= 0.95 * 5 * limit
    assert sum(one < 0.95 * limit for one in used) <= 0.005 * len(used)
