"""Which policy gives a fleet how many tokens, and how soon: in virtual time, with simulated engines.

    python -m benchmarks.routing [--replicas 4,16,64] [--policies power_of_two,prefix_affinity] [--quick]

Tables, policies and the reading of bodies are the gateway's own, the engines are the simulator's: a model of
vLLM's scheduler and prefix cache. Nothing is measured in real time; the same options give the same figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles

from benchmarks.command import choices, numbers, say
from benchmarks.prompts import WORKLOADS, Workload, paced
from benchmarks.table import markdown
from benchmarks.virtual import Fleet, Plan, Tally, closed_loop
from penstock.config.schema.routing import POLICIES
from penstock.engines.sim.options import SimOptions

BASELINE = "power_of_two"
AFFINITY = "prefix_affinity"

ENGINE = {
    "max_model_len": 32_768,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,  # vLLM's default for a server on an H100
    "kv_tokens": 192_000,
    "prefill_tokens_per_s": 25_000,
    "prefill_per_kv_token_ns": 1.3,
    "step_base_ms": 7.0,
    "step_per_request_ms": 0.03,
    "step_per_kv_token_ns": 50.0,
    "adapter_load_s": 0.5,
}
"""An 8B model in bf16 (32 layers, 8 KV heads of 128: 128 KiB of KV a token) on an H100.

prefill: 16 GFLOP a token, and 0.5 MFLOP for each token before it, at 40 % of 990 TFLOP/s. step_base: 16 GB
of weights at 3.35 TB/s are 4.8 ms, and 2 ms of launches and sampling. per KV token: 128 KiB at 2.6 TB/s.
adapter_load_s: 80 MB from object storage.
kv_tokens: what a card of 48 GB leaves beside the weights; one of 80 GB leaves twice as much.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One run's figures. Units: seconds, tokens a second, shares of 1; imbalance: busiest over mean."""

    workload: str
    policy: str
    replicas: int
    gateways: int
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float
    made_tokens_per_s: float
    all_tokens_per_s: float
    imbalance: float
    requests: int
    preemptions: int
    loads_per_s: float
    cpu_s: float


def main() -> None:
    options = _options()
    rows: list[Row] = []
    for plan in _plans(options):
        rows.append(measure(*plan))
        say(_line(rows[-1]))
    print("\n\n".join([*tables(rows), paced_table(options)]))
    if options.json:
        engine = {**ENGINE, "kv_tokens": options.kv_tokens}
        settings = {"engine": engine, "warmup_s": options.warmup, "measured_s": options.seconds}
        written = {**settings, "seed": options.seed, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def measure(workload: Workload, plan: Plan) -> Row:
    """Runs it."""
    begun = time.process_time()
    tally = Fleet(plan, closed_loop(workload, plan)).run()
    return _row(workload, plan, tally, time.process_time() - begun)


def _row(workload: Workload, plan: Plan, tally: Tally, cpu_s: float) -> Row:
    ttft = quantiles(tally.ttft_s, n=100)
    return Row(
        workload=workload.name,
        policy=plan.policy,
        replicas=plan.replicas,
        gateways=plan.gateways,
        ttft_p50_s=round(ttft[49], 4),
        ttft_p99_s=round(ttft[98], 4),
        hit_rate=round(tally.cached_tokens / tally.prompt_tokens, 4),
        made_tokens_per_s=round(tally.made_tokens / plan.measured_s, 1),
        all_tokens_per_s=round((tally.made_tokens + tally.prompt_tokens) / plan.measured_s, 1),
        imbalance=round(fmean(tally.imbalance), 3),
        requests=tally.requests,
        preemptions=tally.preemptions,
        loads_per_s=round(tally.loads / plan.measured_s, 2),
        cpu_s=round(cpu_s, 1),
    )


def paced_table(options: argparse.Namespace) -> str:
    """Markdown: where short conversations with one system prompt go when hardly anything runs."""
    lines: list[Sequence[str]] = []
    for policy in _ESSENTIAL:
        for at_once, replicas in itertools.product(_PACED_AT_ONCE, _PACED_REPLICAS):
            tally = paced_tally(policy, replicas, at_once)
            requests = ", ".join(str(count) for _, count in tally.sent.most_common())
            hits = f"{tally.cached_tokens / tally.prompt_tokens:.1%}"
            lines.append((policy, str(replicas), str(at_once), requests, f"{_mean_ms(tally):.1f}", hits))
    head = ("policy", "replicas", "at once", "requests by replica", "TTFT mean ms", "prefix hits")
    return "### paced conversations, one system prompt\n\n" + markdown(head, lines)


def paced_tally(policy: str, replicas: int, at_once: int) -> Tally:
    """40 conversations of 3 turns, of which `at_once` are open at a time."""
    engine = SimOptions.model_validate(ENGINE)
    plan = Plan(policy, replicas, 1, 0.0, _PACED_S, engine)
    return Fleet(plan, [(0.0, turns) for turns in paced(at_once)]).run()


def _mean_ms(tally: Tally) -> float:
    return 1e3 * fmean(tally.ttft_s)


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """Markdown: one table for each workload, and one of gateways that do not talk to each other."""
    names = [workload.name for workload in WORKLOADS]
    for workload in WORKLOADS:
        mine = [row for row in rows if row.workload == workload.name and row.gateways == 1]
        if mine:
            yield f"### {workload.title}\n\n" + markdown(_HEAD, [_cells(row, mine) for row in mine])
    several = [row for row in rows if row.gateways > 1]
    if several:
        alike = [row for row in rows if any(_alike(row, other) for other in several)]
        alike.sort(key=lambda row: (names.index(row.workload), row.gateways))
        lines = [_gateway_cells(row, rows) for row in alike]
        yield "### several gateways\n\n" + markdown(_GATEWAYS_HEAD, lines)


_HEAD = [
    *("policy", "replicas", "TTFT p50 ms", "TTFT p99 ms", "prefix hits", "generated tok/s"),
    *(f"of {BASELINE}", "all tok/s", "imbalance", "adapter loads/s"),
]
_GATEWAYS_HEAD = [
    *("workload", "policy", "replicas", "gateways", "prefix hits", "generated tok/s", "of one"),
    "adapter loads/s",
]


def _cells(row: Row, others: Sequence[Row]) -> list[str]:
    base = [r for r in others if r.policy == BASELINE and r.replicas == row.replicas]
    ratio = f"{row.made_tokens_per_s / base[0].made_tokens_per_s:.2f}" if base else "-"
    return [
        *(row.policy, str(row.replicas), f"{1e3 * row.ttft_p50_s:,.0f}", f"{1e3 * row.ttft_p99_s:,.0f}"),
        *(f"{row.hit_rate:.1%}", f"{row.made_tokens_per_s:,.0f}", ratio),
        *(f"{row.all_tokens_per_s:,.0f}", f"{row.imbalance:.2f}", _loads(row)),
    ]


def _gateway_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    one = next((r for r in rows if r.gateways == 1 and _alike(r, row)), None)
    ratio = f"{row.made_tokens_per_s / one.made_tokens_per_s:.3f}" if one else "-"
    hits = f"{row.hit_rate:.1%}"
    fleet = (row.policy, str(row.replicas), str(row.gateways))
    return [row.workload, *fleet, hits, f"{row.made_tokens_per_s:,.0f}", ratio, _loads(row)]


def _loads(row: Row) -> str:
    return f"{row.loads_per_s:.1f}" if row.loads_per_s else "-"


def _alike(row: Row, other: Row) -> bool:
    """But for the number of gateways."""
    left, right = ((r.workload, r.policy, r.replicas) for r in (row, other))
    return left == right


def _line(row: Row) -> str:
    return (
        f"{row.workload} {row.policy} {row.replicas}x{row.gateways}: {row.made_tokens_per_s:,.0f} tok/s, "
        f"TTFT p50 {1e3 * row.ttft_p50_s:,.0f} ms, hits {row.hit_rate:.1%} ({row.cpu_s:.1f} s)"
    )


def _plans(options: argparse.Namespace) -> Iterable[tuple[Workload, Plan]]:
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    for workload in workloads:
        for replicas in options.replicas:
            for name in options.policies if replicas <= _LARGE else options.large_policies:
                if name == "adapter_affinity" and not workload.adapter_slots:
                    continue  # power_of_two under another name
                yield workload, _plan(options, name, replicas, workload)
    several = [count for count in options.gateways if count > 1]
    for workload in workloads:
        for count in several:
            yield (
                workload,
                replace(_plan(options, AFFINITY, _middle(options.replicas), workload), gateways=count),
            )


def _plan(options: argparse.Namespace, policy: str, replicas: int, workload: Workload) -> Plan:
    engine = SimOptions.model_validate({**ENGINE, "kv_tokens": options.kv_tokens})
    slots = workload.adapter_slots
    return Plan(policy, replicas, 1, options.warmup, options.seconds, engine, options.seed, slots)


def _middle(counts: Sequence[int]) -> int:
    return sorted(counts)[len(counts) // 2]


def _options() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=_FIRST_LINE)
    add = parser.add_argument
    add("--replicas", type=numbers, default=[4, 16, 64], metavar="N,N", help="sizes of the fleet")
    add("--gateways", type=numbers, default=[1, 2, 4], metavar="N,N", help="gateways that do not talk")
    add("--policies", type=choices(POLICIES), default=_DEFAULT_POLICIES, metavar="NAMES")
    add("--workloads", type=choices(names), default=names, metavar="NAMES", help=f"some of {','.join(names)}")
    add("--warmup", type=float, default=40.0, help="virtual seconds before the measured ones")
    add("--seconds", type=float, default=40.0, help="measured virtual seconds")
    add("--kv-tokens", type=int, default=ENGINE["kv_tokens"], help="of each replica's cache")
    add("--seed", type=int, default=0, help="other dice")
    add("--quick", action="store_true", help="four replicas, one gateway, two policies: half a minute")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    options = parser.parse_args()
    options.large_policies = options.policies if options.policies is not _DEFAULT_POLICIES else _ESSENTIAL
    if options.quick:
        options.replicas, options.gateways, options.policies = [4], [1], _ESSENTIAL
    return options


_PACED_AT_ONCE, _PACED_REPLICAS, _PACED_S = (1, 2, 6), (2, 16), 400.0
_LARGE = 32  # replicas; beyond, only the essential policies unless others are asked for
_ESSENTIAL = [AFFINITY, BASELINE]
_DEFAULT_POLICIES = list(POLICIES)
_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
