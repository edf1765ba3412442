"""The benchmarks' tables: whose process is whose, and that no failure is left out."""

from typing import Any

import pytest
from benchmarks.faults import PROCESSES
from benchmarks.processes import Usage, kind_of
from benchmarks.record import Record, Run, Spread, Start
from benchmarks.table import markdown, render

pytestmark = pytest.mark.full

FIGURES: dict[str, Any] = {
    "ttft_ms": {"p50": 5.0, "p99": 9.0},
    "itl_ms": {"p50": 1.0, "p99": 2.0},
    "statuses": {"200": 90, "503": 3},
    "cpu_s": 0.1,
    "real_time": True,
}


def run(contestant: str, tokens_per_s: float, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "executor": "uni", "round": 1, "streams": 16, "tokens_per_event": 1.0, "tokens_all": 2000.0,
        "cpu_s": {"engine": 1.0, "front": 0.2, "gateway": 0.1, "ray": 0.0},
        "foreign_cores": 0.0, "failures": {}, "figures": FIGURES,
    }  # fmt: skip
    return Run(contestant=contestant, tokens_per_s=tokens_per_s, **{**values, **changes})


def row(table: str, start: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("VLLM::EngineCore", "engine"),
        ("VLLM::Worker", "engine"),
        ("python -P -m penstock.engines.vllm.core.process", "engine"),
        ("python -m vllm.entrypoints.openai.api_server --port 1", "front"),
        ("ray::ServeReplica:penstock:LLMServer:bench", "front"),
        ("ray::ServeReplica:penstock:LLMRouter", "gateway"),
        ("ray::ServeReplica:default:OpenAiIngress", "gateway"),
        ("ray::ProxyActor", "gateway"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/bench", "ray"),
    ],
)
def test_every_process_has_its_kind(title: str, kind: str) -> None:
    assert kind_of(title) == kind


def test_benchmark_of_kills_names_the_processes_as_they_are() -> None:
    from penstock.data.job import ray_workers
    from penstock.engines.vllm.core import launch

    assert PROCESSES["actor"] == f"ray::{ray_workers._WorkerActor.__name__}"
    assert PROCESSES["core"] == launch._MODULE


def test_cpu_counts_from_the_first_look_and_new_processes_whole() -> None:
    before = Usage({(1, 0.0): ("engine", 10.0)}, 0.0, 0.0)
    after = Usage({(1, 0.0): ("engine", 12.0), (2, 5.0): ("front", 1.5)}, 0.0, 0.0)
    assert after.since(before) == {"engine": 2.0, "front": 1.5, "gateway": 0.0, "ray": 0.0}


def test_ratio_is_of_the_bare_server_under_the_same_executor() -> None:
    runs = [run("vllm", 1000.0), run("vllm", 500.0, executor="mp"), run("penstock", 900.0)]
    assert "0.90" in row(render(Record({}, {}, [], runs)), "penstock serve (uni)")


def test_rounds_become_median_and_extremes() -> None:
    runs = [run("vllm", value, round=number) for number, value in enumerate((900.0, 1000.0, 1400.0))]
    assert row(render(Record({}, {}, [], runs)), "vllm serve (uni)")[2:4] == ["1,000", "900-1,400"]


def test_failed_requests_are_marked_and_explained() -> None:
    text = render(Record({}, {}, [], [run("penstock", 900.0, failures={"status": 3})]))
    assert row(text, "penstock serve (uni)")[-1] == "3 (!)"
    assert "Requests failed: penstock serve (uni), 16 streams, round 1: {'status': 3}" in text


def test_a_contestant_that_did_not_start_is_named() -> None:
    text = render(Record({}, {}, [Start("ray-llm", "mp", 1, failure="It ended with code 1.")], []))
    assert "Failed: Ray Serve LLM (mp), round 1: It ended with code 1." in text


def test_foreign_load_is_told() -> None:
    assert "other processes took 0.5 cores" in render(
        Record({}, {}, [], [run("vllm", 1.0, foreign_cores=0.5)])
    )


def test_figures_of_a_starved_client_are_told() -> None:
    starved = run("vllm", 1.0, figures=FIGURES | {"real_time": False})
    assert "no real-time priority" in render(Record({}, {}, [], [run("vllm", 1.0), starved]))


def test_columns_of_a_table_are_aligned() -> None:
    assert markdown(["a", "b"], [["long", "1"]]) == "| a    |  b |\n| ---- | -: |\n| long |  1 |"


def test_spread_needs_values() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([None])
