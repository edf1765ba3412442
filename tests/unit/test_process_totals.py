"""What gateway processes of one port add up: counters for ever, what is open while they live."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path

import pytest

from penstock.metrics import REQUEST, GatewayFigures
from penstock.serve.gateway.telemetry.process_totals import ProcessTotals

MODEL = (("model", "m"),)
ROUTE = ("m", "/v1/completions")


def figures(requests: float, since: float, open_now: float = 1.0) -> GatewayFigures:
    return GatewayFigures(
        counters={"requests": {("requests_total", MODEL): requests, ("requests_created", MODEL): since}},
        gauges={"open": {("open", MODEL): open_now}},
        latencies={REQUEST.name: {ROUTE: [requests, 0.0, 0.5]}},
    )


def joined(folder: Path, found: GatewayFigures) -> ProcessTotals:
    totals = ProcessTotals(folder, lambda: deepcopy(found))
    totals.join()
    return totals


async def test_counters_of_a_process_stay_when_it_leaves_and_what_was_open_goes(tmp_path: Path):
    folder = tmp_path / "together"
    first, second = joined(folder, figures(3, since=20)), joined(folder, figures(4, since=10))
    first.total()
    assert second.total().gauges == figures(0, 0, open_now=2).gauges
    first.close()
    left = second.total()
    assert left.counters == figures(7, since=10).counters
    assert left.gauges == figures(0, 0, open_now=1).gauges
    assert left.latencies[REQUEST.name][ROUTE] == [7, 0, 1.0]
    third = joined(folder, figures(5, since=30))
    assert third.total().counters == second.total().counters == figures(12, since=10).counters
    second.close()
    third.close()
    assert not folder.exists()


async def test_a_folder_that_cannot_be_used_leaves_a_process_its_own_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "taken").touch()
    with caplog.at_level(logging.WARNING):
        totals = joined(tmp_path / "taken", figures(3, since=1))
    assert totals.total() == figures(3, since=1)
    assert "/metrics shows one of several gateway processes" in caplog.text
    totals.close()
