"""Stages that share engines, engines side by side, and stages that differ.

`python -m benchmarks.shared_engines --rows 640`. Two turns of a conversation, each a stage: on two engines of
their own, against one that both share, in rows per second and engine; where the first prompts are short, and
where they are long, so that the second turn finds its beginning in a shared engine's cache. Then rows per
second of 1 to 8 engines. Then pictures made smaller on CPU, a small model, and one half as fast: who works
when. Engines are simulated, since real ones would share the cores; `--real` runs the first table with vLLM.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from PIL import Image
from ray import serve

from benchmarks.command import numbers, say
from benchmarks.record import machine
from penstock.data import (
    EngineProcessorConfig,
    LLMConfig,
    ProcessorConfig,
    ServeDeploymentProcessorConfig,
    build_processor,
)
from penstock.serve import build_llm_deployment

STEP_S, TOKENS = 0.010, 64


@dataclass(frozen=True, slots=True)
class Load:
    """words: of a first prompt. seats: rows in an engine's batch."""

    words: int
    seats: int
    prefill_tokens_per_s: float = float("inf")


SHORT = Load(words=2, seats=8)
LONG = Load(words=1500, seats=32, prefill_tokens_per_s=20_000)
BEST = SHORT.seats / STEP_S / TOKENS
"""Rows per second of one simulated engine that is always full."""

_BATCH = 8
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40
_APP = "bench"

Span = tuple[float, float]
"""A row's begin and end in a stage, in seconds."""


def model(load: Load, real: bool, replicas: int = 1, step_s: float = STEP_S) -> LLMConfig:
    engine: dict[str, Any] = {"max_num_seqs": load.seats}
    if real:
        engine |= {"max_model_len": 8192, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
        source = {"model_id": "bench", "model_source": "demo"}
    else:
        engine |= {"step_base_ms": step_s * 1000, "step_per_request_ms": 0.0, "kv_tokens": 1 << 21}
        engine |= {"prefill_tokens_per_s": load.prefill_tokens_per_s, "reply": "word " * TOKENS}
        source = {"model_id": "bench"}
    return LLMConfig(
        model_loading_config=source,
        llm_engine="vllm" if real else "sim",
        engine_kwargs=engine,
        deployment_config={"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}},
        postprocessor=ended,
    )


def ended(response: dict[str, Any]) -> dict[str, Any]:
    """The response with the time as its last word, beside the engine: a row may wait for its postprocessing,
    which must not count. With vLLM (`--real`) it costs the direct path."""
    message = response["choices"][0]["message"]
    message["content"] = f"{message['content']} {time.time()}"
    return response


def turn(row: dict[str, Any], words: int) -> dict[str, Any]:
    """The first one, or the one after what was said."""
    messages = [{"role": "user", "content": f"{row['id']} " * words}]
    if row.get("said"):
        messages.append({"role": "assistant", "content": row["said"]})
        messages.append({"role": "user", "content": "And then?"})
    return {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True}


def stamped(row: dict[str, Any]) -> dict[str, Any]:
    before = row.get("stamps") or []
    said, _, end = row["generated_text"].rpartition(" ")
    stamps = [*before, float(end) - row["time_taken_llm"], float(end)]
    return {"id": row["id"], "said": said, "stamps": stamps}


def shrunk(row: dict[str, Any]) -> dict[str, Any]:
    """A picture made, decoded and made smaller: some 15 ms of CPU."""
    began, file = time.time(), io.BytesIO()
    Image.effect_mandelbrot((800, 600), (-2, -1, 1, 1), 20).save(file, "JPEG")
    Image.open(file).resize((224, 224)).tobytes()
    return {"id": row["id"], "stamps": [began, time.time()]}


def piped(
    rows: int, *configs: ProcessorConfig, first: Any = None, words: int = SHORT.words
) -> tuple[float, list[list[Span]]]:
    """Rows per second from the first row's begin to the last one's end, and the spans of each stage.

    first: work on each row before the first config's stage, a stage of its own.
    """
    dataset = ray.data.range(rows, override_num_blocks=max(1, rows // _BATCH))
    if first is not None:
        dataset = dataset.map(first)
    for config in configs:
        dataset = build_processor(config, preprocess=partial(turn, words=words), postprocess=stamped)(dataset)
    stamps = [row["stamps"] for row in dataset.take_all()]
    stages = [[(row[n], row[n + 1]) for row in stamps] for n in range(0, len(stamps[0]), 2)]
    begin, end = bounds(stages)
    return rows / (end - begin), stages


def bounds(stages: list[list[Span]]) -> Span:
    spans = [span for stage in stages for span in stage]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def own(load: Load, real: bool, replicas: int = 1, step_s: float = STEP_S) -> EngineProcessorConfig:
    config = model(load, real, step_s=step_s)
    return EngineProcessorConfig(llm_config=config, concurrency=replicas, batch_size=_BATCH)


def shared() -> ServeDeploymentProcessorConfig:
    return ServeDeploymentProcessorConfig(app_name=_APP, batch_size=_BATCH)


def served(load: Load, real: bool, replicas: int) -> None:
    serve.run(build_llm_deployment(model(load, real, replicas)), name=_APP, route_prefix=None)


def occupancy(stages: list[list[Span]], seats: int, *, of: int | None = None) -> str:
    """Share of `seats` places with a row in them, over the time of all stages; of all, or of stage `of`."""
    begin, end = bounds(stages)
    steps = [begin + (n + 0.5) / _WIDTH * (end - begin) for n in range(_WIDTH)]
    spans = [span for stage in (stages if of is None else [stages[of]]) for span in stage]
    inside = [min(1.0, sum(a <= at < b for a, b in spans) / seats) for at in steps]
    return "".join(_BARS[round(share * (len(_BARS) - 1))] for share in inside)


def two_turns(rows: int, real: bool) -> list[str]:
    """The first table."""
    lines = [
        "| first prompts | engines | rows/s | rows/s and engine | of two engines | places taken |",
        "|---|---|---|---|---|---|",
    ]
    for name, load in (("short", SHORT), ("long", LONG)):
        two, two_spans = piped(rows, own(load, real), own(load, real), words=load.words)
        served(load, real, 1)
        one, one_spans = piped(rows, shared(), shared(), words=load.words)
        serve.delete(_APP)
        bars = occupancy(two_spans, 2 * load.seats), occupancy(one_spans, load.seats)
        lines.append(f"| {name} | two, own | {two:.1f} | {two / 2:.1f} | 1.00 | `{bars[0]}` |")
        lines.append(f"| {name} | one, shared | {one:.1f} | {one:.1f} | {one / two * 2:.2f} | `{bars[1]}` |")
    return lines


def side_by_side(rows: int, counts: list[int]) -> list[str]:
    """The second table."""
    lines = ["| engines | own: rows/s | efficiency | shared: rows/s | efficiency | places taken (shared) |"]
    lines.append("|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for count in counts:
        mine, _ = piped(rows, own(SHORT, real=False, replicas=count))
        served(SHORT, False, count)
        theirs, spans = piped(rows, shared())
        serve.delete(_APP)
        first = first or (mine / count, theirs / count)
        shares = mine / count / first[0], theirs / count / first[1]
        lines.append(
            f"| {count} | {mine:.1f} | {shares[0]:.2f} | {theirs:.1f} | {shares[1]:.2f} "
            f"| `{occupancy(spans, count * SHORT.seats)}` |"
        )
        say(lines[-1])
    return lines


def different(rows: int) -> list[str]:
    """The third table."""
    rate, stages = piped(rows, own(SHORT, False), own(SHORT, False, step_s=2 * STEP_S), first=shrunk)
    lines = ["| stage | alone: rows/s | who works when |", "|---|---|---|"]
    cpu_s = sum(end - begin for begin, end in stages[0]) / rows
    for n, (name, alone, seats) in enumerate(
        (
            ("pictures", 1 / cpu_s, 1),
            ("small model", BEST, SHORT.seats),
            ("large model", BEST / 2, SHORT.seats),
        )
    ):
        lines.append(f"| {name} | {alone:.1f} | `{occupancy(stages, seats, of=n)}` |")
    return [*lines, "", f"Together {rate:.2f} rows/s, {rate / (BEST / 2):.2f} of the slowest stage alone."]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--engines", type=numbers, default=[1, 2, 4, 6, 8])
    parser.add_argument("--real", action="store_true", help="the first table with vLLM, and no other")
    options = parser.parse_args()
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    serve.start(proxy_location="Disabled")
    try:
        lines = two_turns(options.rows, options.real)
        say("\n".join(lines))
        if not options.real:
            lines += [
                "",
                f"One engine, always full: {BEST:.1f} rows/s.",
                "",
                *side_by_side(options.rows, options.engines),
                "",
                *different(options.rows // 2),
            ]
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(machine()))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
