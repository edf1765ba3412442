"""Does the simulator tell the truth? Two real vLLM replicas on CPU, and two simulated ones.

    python -m benchmarks.agreement [--rounds 3] [--rate 2.5] [--json FILE]

First one real replica alone is measured, and the simulator's speeds are fitted to it (`calibrate`). Then, for
each policy and round, `penstock serve` runs two replicas anew, and requests with long shared prefixes come at
a fixed rate; the simulator runs the same requests at the same times. Compared are the median TTFT and the
share of prompt tokens that were found in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy
import yaml

from benchmarks import processes
from benchmarks.command import choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Contestant, Running
from benchmarks.prompts import Turn
from benchmarks.table import markdown
from benchmarks.virtual import Client, Fleet, Plan, Tally
from benchmarks.workload import MODEL_ID, Workload
from penstock.engines.sim.options import SimOptions

BLOCK_SIZE = 32
KV_BLOCKS = 320
ENGINE: Mapping[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 1 << 28,
    "num_gpu_blocks_override": KV_BLOCKS + 1,  # vLLM keeps one for itself
    "enable_prompt_tokens_details": True,
    "distributed_executor_backend": "uni",
}
PREFIXES, PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 12, (1400, 2200), (60, 200), 16
POLICIES = ("power_of_two", "prefix_affinity")
_VOCABULARY = (100, 1000)
_NOISY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one real replica takes alone. front_ms: all that is not the engine's steps, HTTP included."""

    prefill_tokens_per_s: float
    prefill_per_kv_token_ns: float
    step_base_ms: float
    step_per_request_ms: float
    front_ms: float


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer. Units: seconds, tokens."""

    ttft_s: float
    itl_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """One round under one policy, real or simulated. foreign_cores: what others took of the machine."""

    who: str
    policy: str
    round: int
    ttft_p50_ms: float
    hit_rate: float
    requests: int
    foreign_cores: float = 0.0


def main() -> None:
    options = _options()
    refuse_strangers(options.shared)
    results: list[Result] = []
    with cleaned_up(), tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        speeds = options.speeds or calibrate(model)
        say(f"calibrated: {speeds}")
        for round_ in range(options.first, options.first + options.rounds):
            for policy in options.policies:
                results += compare(model, speeds, policy, round_, options)
    print(_table(results))
    if options.json:
        written = {"speeds": asdict(speeds), "engine": ENGINE, "rate": options.rate}
        written["results"] = [asdict(result) for result in results]
        options.json.write_text(json.dumps(written, indent=1) + "\n")


# -- the model


def make_model(folder: Path) -> Path:
    """Random weights, large enough that prefill takes the time: 8 million parameters, 0.1 ms a token."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    import penstock

    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(penstock.demo_model())
    config.hidden_size, config.intermediate_size = 256, 2048
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    config.num_attention_heads = config.num_key_value_heads = 4
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(penstock.demo_model()).save_pretrained(folder)
    return folder


# -- real replicas


def start(model: Path, replicas: int, policy: str) -> Running:
    """`penstock serve` when it has answered once."""
    workload = Workload(model, "uni")

    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        config = folder / "model.yaml"
        written = {
            "model_loading_config": {"model_id": MODEL_ID, "model_source": str(model)},
            "accelerator_config": {"kind": "cpu"},
            "deployment_config": {"num_replicas": replicas},
            "routing_policy": policy,
            "engine_kwargs": dict(ENGINE),
        }
        config.write_text(yaml.safe_dump(written))
        penstock = [sys.executable, "-c", "from penstock.cli import main; main()"]
        return [*penstock, "serve", str(config), "--port", str(port)]

    running = Running.start(Contestant("penstock", "penstock serve", command), workload)
    running.first_token(workload)
    return running


async def ask(port: int, body: bytes) -> Seen:
    """One streamed completion, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    begun = time.perf_counter()
    writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
    times: list[float] = []
    usage: dict[str, Any] = {}
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("choices"):
                times.append(time.perf_counter())
            usage = event.get("usage") or usage
    writer.close()
    details = usage["prompt_tokens_details"] or {}
    itl_s = (times[-1] - times[0]) / max(1, len(times) - 1)
    return Seen(times[0] - begun, itl_s, usage["prompt_tokens"], details.get("cached_tokens", 0))


def calibrate(model: Path) -> Speeds:
    """One replica alone, asked one request at a time, then a few at once."""
    running = start(model, 1, POLICIES[0])
    try:
        return asyncio.run(_calibrate(running.port))
    finally:
        running.stop()
        running.forget()


async def _calibrate(port: int) -> Speeds:
    draw = random.Random("calibrate")
    for _ in range(5):
        await ask(port, turn(_ids(draw, 500), 8).body)
    prefix = _ids(draw, 1792)
    await ask(port, turn(prefix, 1).body)
    prompts = [(0, n) for n in (300, 700, 1100, 1600, 2000)] + [(len(prefix), n) for n in (60, 120, 200)]
    times = [(*p, await _ttft(port, draw, prefix[: p[0]], p[1])) for p in prompts * 5]
    constant, per_token, per_pair = prefill(times)
    base, per_request = decode([(n, await _itl(port, draw, n)) for n in (1, 2, 4) * 2])
    front = max(0.0, constant - base)
    return Speeds(1 / per_token, per_pair * 1e9, base * 1e3, max(0.0, per_request) * 1e3, front * 1e3)


def prefill(times: Sequence[tuple[int, int, float]]) -> Sequence[float]:
    """Seconds: constant, for each new token, and for each pair of a new token and one before it.

    times: tokens in the cache, new tokens, seconds. The relative errors are made least.
    """
    rows = [(1 / t, n / t, n * (cached + n / 2) / t) for cached, n, t in times]
    return numpy.linalg.lstsq(numpy.array(rows), numpy.ones(len(rows)), rcond=None)[0].tolist()


def decode(times: Sequence[tuple[int, float]]) -> Sequence[float]:
    """Seconds of a step, and for each request in it."""
    rows = numpy.array([(1.0, float(n)) for n, _ in times])
    return numpy.linalg.lstsq(rows, numpy.array([t for _, t in times]), rcond=None)[0].tolist()


async def _ttft(port: int, draw: random.Random, prefix: list[int], tokens: int) -> float:
    return (await ask(port, turn([*prefix, *_ids(draw, tokens)], 1).body)).ttft_s


async def _itl(port: int, draw: random.Random, streams: int) -> float:
    """Of answers that are made together; the beginnings, when the others are prefilled, weigh little."""
    asked = [turn(_ids(draw, 300), 200).body for _ in range(streams)]
    return median([seen.itl_s for seen in await asyncio.gather(*(ask(port, body) for body in asked))])


# -- one workload for both


def turn(ids: Sequence[int], tokens: int) -> Turn:
    """A completion of token ids, so that both count the same ones."""
    fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = {"model": MODEL_ID, "prompt": list(ids), "stream_options": {"include_usage": True}, **fields}
    text = struct.pack(f"<{len(ids)}I", *ids) + bytes(4 * tokens)
    return Turn(json.dumps(body).encode(), text, len(ids), tokens, 0.0)


def requests(seed: int, rate: float, seconds: float) -> Iterator[tuple[float, Turn]]:
    """When each comes, and what it asks: one of a few long prefixes, of which some are asked more."""
    draw = random.Random(f"requests {seed}")
    prefixes = [_ids(draw, draw.randint(*PREFIX_TOKENS)) for _ in range(PREFIXES)]
    weights = [(n + 1) ** -0.5 for n in range(PREFIXES)]
    now = 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        own = _ids(draw, draw.randint(*OWN_TOKENS))
        yield now, turn([*draw.choices(prefixes, weights)[0], *own], ANSWER_TOKENS)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*_VOCABULARY) for _ in range(count)]


def compare(
    model: Path, speeds: Speeds, policy: str, round_: int, options: argparse.Namespace
) -> Iterator[Result]:
    """The real replicas, then the simulated ones."""
    asked = list(requests(round_, options.rate, options.warmup + options.seconds))
    if not processes.wait_idle(options.idle_limit):
        say("The machine is not idle.")
    running = start(model, 2, policy)
    try:
        before, own_s = processes.usage(), time.process_time()
        seen = asyncio.run(_drive(running.port, asked))
        foreign = _foreign_cores(before, processes.usage(), time.process_time() - own_s)
    finally:
        running.stop()
        running.forget()
    measured = [one for (at, _), one in zip(asked, seen, strict=True) if at >= options.warmup]
    ttft = median(one.ttft_s for one in measured)
    hits = sum(one.cached_tokens for one in measured) / sum(one.prompt_tokens for one in measured)
    yield _told(Result("real", policy, round_, ttft * 1e3, hits, len(measured), foreign))
    yield _told(simulate(asked, speeds, policy, round_, options))


def _foreign_cores(before: processes.Usage, after: processes.Usage, own_s: float) -> float:
    ours = sum(after.since(before).values()) + own_s
    return (after.machine_s - before.machine_s - ours) / (after.at_s - before.at_s)


async def _drive(port: int, asked: Sequence[tuple[float, Turn]]) -> list[Seen]:
    begun = time.perf_counter()

    async def one(at: float, turn: Turn) -> Seen:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - begun)))
        return await ask(port, turn.body)

    return list(await asyncio.gather(*(one(at, turn) for at, turn in asked)))


def simulate(
    asked: Sequence[tuple[float, Turn]], speeds: Speeds, policy: str, round_: int, options: argparse.Namespace
) -> Result:
    """The same requests at the same times; the mean of several runs, since the policies throw dice."""
    tallies = [_simulated(asked, speeds, policy, seed, options) for seed in range(_SIMULATED_RUNS)]
    ttft = fmean(median(tally.ttft_s) for tally in tallies)
    hits = fmean(tally.cached_tokens / tally.prompt_tokens for tally in tallies)
    return Result("simulated", policy, round_, ttft * 1e3 + speeds.front_ms, hits, len(tallies[0].ttft_s))


_SIMULATED_RUNS = 10


def _simulated(
    asked: Sequence[tuple[float, Turn]], speeds: Speeds, policy: str, seed: int, options: argparse.Namespace
) -> Tally:
    same = {name: ENGINE[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    fitted = {name: value for name, value in asdict(speeds).items() if name != "front_ms"}
    engine = SimOptions.model_validate(
        {**same, **fitted, "block_size": BLOCK_SIZE, "kv_tokens": KV_BLOCKS * BLOCK_SIZE}
    )
    plan = Plan(policy, 2, 1, options.warmup, options.seconds, engine, seed)
    clients: list[Client] = [(at, iter([turn])) for at, turn in asked]
    return Fleet(plan, clients).run()


# -- what came of it


def _table(results: Sequence[Result]) -> str:
    head = [
        "policy",
        "round",
        *("TTFT p50 ms: real", "simulated", "ratio"),
        *("hits: real", "simulated", "ratio"),
    ]
    pairs = [(results[i], results[i + 1]) for i in range(0, len(results), 2)]
    rows = [_cells(real.policy, str(real.round), [real], [simulated]) for real, simulated in pairs]
    for policy in dict.fromkeys(result.policy for result in results):
        mine = [(real, simulated) for real, simulated in pairs if real.policy == policy]
        rows.append(_cells(policy, "median", *zip(*mine, strict=True)))
    return markdown(head, rows)


def _cells(policy: str, round_: str, real: Sequence[Result], simulated: Sequence[Result]) -> list[str]:
    ttft = [median(one.ttft_p50_ms for one in side) for side in (real, simulated)]
    hits = [median(one.hit_rate for one in side) for side in (real, simulated)]
    return [
        *(policy, round_, f"{ttft[0]:.1f}", f"{ttft[1]:.1f}", f"{ttft[1] / ttft[0]:.2f}"),
        *(f"{hits[0]:.1%}", f"{hits[1]:.1%}", f"{hits[1] / hits[0]:.2f}"),
    ]


def _told(result: Result) -> Result:
    what = f"TTFT p50 {result.ttft_p50_ms:.1f} ms, hits {result.hit_rate:.1%}"
    if result.foreign_cores > _NOISY_CORES:
        what += f" (noisy: others took {result.foreign_cores:.1f} cores)"
    say(f"{result.who} {result.policy} {result.round}: {what}")
    return result


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=_FIRST_LINE)
    add = parser.add_argument
    add("--policies", type=choices(POLICIES), default=list(POLICIES), metavar="NAMES")
    add("--rounds", type=int, default=3, help="other requests in each")
    add("--first", type=int, default=0, help="number of the first round: other numbers, other requests")
    add("--rate", type=float, default=2.5, help="requests a second, over both replicas")
    add("--warmup", type=float, default=15.0, help="seconds that fill the caches")
    add("--seconds", type=float, default=45.0, help="measured seconds")
    add("--idle-limit", type=float, default=20.0, help="seconds to wait for an idle machine")
    add("--speeds", type=_speeds, default=None, metavar="A,B,C,D,E", help="of an earlier calibration")
    add("--shared", action="store_true", help="run though other Ray or vLLM processes are there")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    return parser.parse_args()


def _speeds(text: str) -> Speeds:
    return Speeds(*map(float, text.split(",")))


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    main()
