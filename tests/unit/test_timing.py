"""A request's time, part by part: every moment is in exactly one of them."""

from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics
from penstock.serve.gateway.telemetry import timing
from penstock.serve.gateway.telemetry.timing import Timing


def timed(*instants: float) -> Timing:
    return Timing(iter(instants).__next__)


def passed(times: Timing, *parts: str) -> Timing:
    for part in parts:
        times.begin(part)
    times.answer(b"prefill;dur=4.2")
    return times


def test_the_parts_add_up_to_the_time_to_the_first_byte():
    times = timed(1.0, 1.25, 1.5, 3.5, 3.75, 4.0)
    passed(times, timing.RECEIVE, timing.GATEWAY, timing.REPLICA, timing.GATEWAY)
    assert times.parts == {"gateway": 2.5, "receive": 0.25, "replica": 0.25}
    assert times.first_byte_s == sum(times.parts.values()) == 3.0


def test_our_overhead_is_neither_the_clients_nor_the_replicas_time():
    times = timed(0, 1, 3, 7, 15, 31, 63)
    passed(times, timing.RECEIVE, timing.PICK, timing.QUEUE, timing.CONNECT, timing.REPLICA)
    assert times.overhead_s == 1 + 4 + 16


def test_what_was_in_vain_is_told_as_failover():
    times = timed(0, 1, 2, 3, 11, 13, 14)
    for part in (timing.PICK, timing.CONNECT, timing.REPLICA):
        times.begin(part)
    times.failed()
    times.begin(timing.PICK)
    times.begin(timing.REPLICA)
    times.answer()
    assert times.parts == {"gateway": 1, "pick": 3, "failover": 9, "replica": 1}
    assert 'attempts;desc="2"' in times.header().decode()


def test_the_header_has_milliseconds_and_what_the_replica_says():
    times = passed(timed(0.0, 0.0002, 0.0052), timing.REPLICA)
    assert times.header() == (b"gateway;dur=0.200, replica;dur=5.000, prefill;dur=4.2, total;dur=5.200")


LATENCIES = [metrics.REQUEST, metrics.FIRST_TOKEN, metrics.INTER_TOKEN, metrics.OVERHEAD]


@pytest.mark.parametrize("latency", LATENCIES, ids=lambda latency: latency.name)
def test_neighbouring_buckets_differ_by_a_factor_of_two_at_most(latency: metrics.Latency):
    assert all(1 < upper / lower <= 2 for lower, upper in pairwise(latency.bounds))


def test_a_bucket_counts_what_is_at_its_bound_or_below():
    gateway = metrics.GatewayMetrics()
    between = gateway.model("m").on("/r").inter_token
    for seconds in (0.0009, 0.001, 0.0011, 9.0):
        between.observe(seconds)
    (family,) = [
        family
        for family in text_string_to_metric_families(gateway.text().decode())
        if family.name == metrics.INTER_TOKEN.name
    ]
    counts = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert (counts["0.001"], counts["0.002"], counts["4.0"], counts["+Inf"]) == (2, 3, 3, 4)


def test_the_same_route_of_the_same_model_is_one_child():
    gateway = metrics.GatewayMetrics()
    assert gateway.model("m").on("/a") is gateway.model("m").on("/a")
    assert gateway.model("m").on("/a") is not gateway.model("n").on("/a")
