"""One contestant of the batch benchmark, in a process of its own: rows in, stamps out.

`python -m benchmarks.batch_side NAME FOLDER` reads FOLDER/job.json, makes FOLDER/begun with its first row,
and writes FOLDER/told.json at the end: how many seconds its engine took to start, and for each row when its
engine had it (seconds of the clock) and how many tokens it made.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contestants import CONTESTANTS, Running
from benchmarks.workload import MODEL_ID, Workload

Job = dict[str, Any]
Stamps = list[tuple[float, float, int]]
"""Begin, end, tokens."""

BEGUN, TOLD = "begun", "told.json"

_WARM = 64


def sampling(row: Job) -> Job:
    """The same for all: exactly so many tokens, drawn at random."""
    return {
        "max_tokens": row["max_tokens"],
        "min_tokens": row["max_tokens"],
        "ignore_eos": True,
        "temperature": 0.8,
    }


def llm(job: Job) -> tuple[float, Stamps]:
    """`LLM.generate`, all rows in one call, the engine in the same process."""
    from vllm import LLM, SamplingParams

    began = time.time()
    engine = LLM(model=job["model"], disable_log_stats=False, **job["engine"])
    ready = time.time()

    def generate(rows: list[Job]) -> Any:
        params = [SamplingParams(**sampling(row)) for row in rows]
        return engine.generate([row["prompt"] for row in rows], params, use_tqdm=False)

    generate(job["rows"][:_WARM])
    _begin(job["folder"])
    start, monotonic = time.time(), time.monotonic()
    outputs = generate(job["rows"])
    stamps = []
    for output in outputs:
        last = output.metrics.last_token_ts - monotonic if output.metrics else time.time() - start
        stamps.append((start, start + last, len(output.outputs[0].token_ids)))
    return ready - began, stamps


def llm_child(job: Job) -> tuple[float, Stamps]:
    """The same with the engine in processes of its own, vLLM's default."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return llm(job)


def asyncllm(job: Job) -> tuple[float, Stamps]:
    """AsyncLLM with final outputs, as many rows in flight as fit the batch and a quarter more."""
    return asyncio.run(_asyncllm(job))


async def _asyncllm(job: Job) -> tuple[float, Stamps]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.time()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=job["model"], **job["engine"]))
    ready = time.time()
    turns = asyncio.Semaphore(job["engine"]["max_num_seqs"] * 5 // 4)

    async def one(name: str, row: Job) -> tuple[float, float, int]:
        async with turns:
            start = time.time()
            params = SamplingParams(**sampling(row), output_kind=RequestOutputKind.FINAL_ONLY)
            async for output in engine.generate(row["prompt"], params, name):
                tokens = len(output.outputs[0].token_ids)
            return start, time.time(), tokens

    await asyncio.gather(*(one(f"w{n}", row) for n, row in enumerate(job["rows"][:_WARM])))
    _begin(job["folder"])
    stamps = await asyncio.gather(*(one(str(n), row) for n, row in enumerate(job["rows"])))
    engine.shutdown()
    return ready - began, list(stamps)


def ray_data(job: Job) -> tuple[float, Stamps]:
    """Ray Data LLM at its best settings: fixed pool, blocks of 128, detokenised once."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    with _cluster() as ray:
        config = vLLMEngineProcessorConfig(
            model_source=job["model"],
            engine_kwargs=job["engine"],
            placement_group_config={"bundles": [{"CPU": 1, "GPU": 0}]},
            concurrency=(1, 1),
            batch_size=128,
            log_engine_metrics=False,
            chat_template_stage=False,
            tokenize_stage=False,
            detokenize_stage=False,
        )
        processor = build_processor(
            config,
            preprocess=lambda row: row | {"sampling_params": sampling(row)},
            postprocess=_end,
        )
        return _piped(ray, processor, job, 128)


def own(job: Job) -> tuple[float, Stamps]:
    """Penstock, engines of the pipeline's own."""
    from penstock.data import build_processor, vLLMEngineProcessorConfig

    with _cluster() as ray:
        config = vLLMEngineProcessorConfig(model_source=job["model"], engine_kwargs=job["engine"])
        processor = build_processor(config, program=_stamped)
        return _piped(ray, processor, job, 64)


def fleet(job: Job) -> tuple[float, Stamps]:
    """Penstock, a deployment that is served already."""
    from penstock.data import ServeDeploymentProcessorConfig, build_processor

    with _cluster() as ray, _served(job) as ready_s:
        processor = build_processor(ServeDeploymentProcessorConfig(app_name="bench"), program=_stamped)
        processor([{"prompt": "Hello", "max_tokens": 8}] * _WARM)
        return ready_s, _piped(ray, processor, job, 64)[1]


def url(job: Job) -> tuple[float, Stamps]:
    """Penstock, by the URL of a service: `penstock serve` on a port of its own."""
    from penstock.data import HttpRequestProcessorConfig, build_processor

    with _listening(job) as (address, ready_s), _cluster() as ray:
        config = HttpRequestProcessorConfig(
            url=address,
            model=MODEL_ID,
            max_in_flight=job["engine"]["max_num_seqs"] * 5 // 4,
        )
        processor = build_processor(config, program=_stamped)
        processor([{"prompt": "Hello", "max_tokens": 8}] * _WARM)
        return ready_s, _piped(ray, processor, job, 64)[1]


def _begin(folder: str) -> None:
    """Says that the first row has begun; again costs a microsecond."""
    if not os.path.exists(file := f"{folder}/{BEGUN}"):
        open(file, "w").close()


async def _stamped(row: Job, llm: Any) -> Job:
    """A row that says when its answer came, which a pipeline tells of whole blocks only."""
    if "folder" in row:
        _begin(row["folder"])
    reply = await llm.complete(row["prompt"], **sampling(row))
    return {"end": time.time(), "took": reply.columns["time_taken_llm"], "tokens": reply.generated_tokens}


def _end(row: Job) -> Job:
    """When a row came out, how long its engine had it, and its tokens."""
    _begin(row["folder"])
    return {"end": time.time(), "took": row["time_taken_llm"], "tokens": row["num_generated_tokens"]}


def _piped(ray: Any, processor: Any, job: Job, block: int) -> tuple[float, Stamps]:
    """All rows through a pipeline. Its engine starts in it: it is ready when its first row begins."""
    began = time.time()
    rows = [row | {"folder": job["folder"]} for row in job["rows"]]
    blocks = max(1, len(rows) // block)
    ends = processor(ray.data.from_items(rows, override_num_blocks=blocks)).take_all()
    stamps = [(row["end"] - row["took"], row["end"], row["tokens"]) for row in ends]
    return min(begin for begin, _, _ in stamps) - began, stamps


@contextmanager
def _cluster() -> Iterator[Any]:
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=300 << 20)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _served(job: Job) -> Iterator[float]:
    from ray import serve

    from penstock.serve import LLMConfig, build_openai_app

    began = time.time()
    config = LLMConfig(
        model_loading_config={"model_id": "bench", "model_source": job["model"]},
        engine_kwargs=job["engine"],
        deployment_config={"max_ongoing_requests": 1000},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    serve.run(build_openai_app({"llm_configs": [config]}), name="bench")
    try:
        yield time.time() - began
    finally:
        serve.shutdown()


@contextmanager
def _listening(job: Job) -> Iterator[tuple[str, float]]:
    """URL, and seconds until it answered."""
    workload = Workload(Path(job["model"]), "uni")
    (contestant,) = (each for each in CONTESTANTS if each.name == "penstock")
    running = Running.start(contestant, workload)
    try:
        yield f"http://127.0.0.1:{running.port}/v1", running.first_token(workload)
    finally:
        running.stop()
        running.forget()


SIDES: dict[str, Callable[[Job], tuple[float, Stamps]]] = {
    "llm": llm,
    "llm-child": llm_child,
    "asyncllm": asyncllm,
    "ray-data": ray_data,
    "own": own,
    "fleet": fleet,
    "url": url,
}


def main() -> None:
    name, folder = sys.argv[1:]
    ready_s, stamps = SIDES[name]({**json.loads((Path(folder) / "job.json").read_text()), "folder": folder})
    told = Path(folder) / f"{TOLD}.part"
    told.write_text(json.dumps({"ready_s": ready_s, "stamps": stamps}))
    told.rename(told.with_suffix(""))


if __name__ == "__main__":
    main()
