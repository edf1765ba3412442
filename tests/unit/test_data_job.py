"""Whole jobs in this process, with a simulated engine: what is job_spec, what is kept, what is refused."""

import asyncio
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from tests.waiting import until

from penstock.cli.batch.run import config_of
from penstock.config import LLMConfig
from penstock.data.backends.engine_config import engine_identity, lacks_chat_template
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import RetryPolicy
from penstock.data.job import manifest
from penstock.data.job.api import batch, make_worker_pool
from penstock.data.job.job import Job
from penstock.data.job.output import OutputWriter
from penstock.data.job.pending import map_in_threads
from penstock.data.job.preview import preview
from penstock.data.job.protocol import WorkerLost, WorkItem
from penstock.data.job.report import JobReport, Limits, Prices, ProgressListener, RunStats
from penstock.data.job.spec import EngineSpec, JobSpec
from penstock.data.job.validation import check_continuation, continued
from penstock.data.job.worker import InProcessPool
from penstock.data.journal.answer_cache import AnswerCache, CacheKey
from penstock.data.journal.index import Index
from penstock.data.journal.lock import OutputLocked, acquire_lock, lost_lock
from penstock.data.results.outcome import Outcome
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import LocalPath, RemotePath, storage_path
from penstock.data.storage.readers import InputRow
from penstock.engine import no_progress
from penstock.errors import ConfigError, EngineDead, EngineStartFailed, Unavailable

FAST = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": float("inf")}


def job(spec: JobSpec, *, engine: dict | None = None, **options) -> Job:
    config = LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs={**FAST, **(engine or {})}
    )
    return Job(spec, InProcessPool(lambda: InProcessEngine(config)), **options)


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., JobSpec]:
    """The spec of a job over rows, with the output `out.jsonl`."""

    def make(rows: list, output: str = "out.jsonl", **options) -> JobSpec:
        path = tmp_path / "in.jsonl"
        if not path.exists():
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            path.write_text("".join(f"{line}\n" for line in lines))
        return JobSpec(inputs=(str(path),), output=str(tmp_path / output), **options)

    return make


def texts(count: int) -> list[dict]:
    return [{"id": number, "prompt": f"row {number}"} for number in range(count)]


def read(path: str) -> list[dict]:
    return [json.loads(text) for text in Path(path).read_text().splitlines()]


async def test_each_row_is_answered_in_the_order_of_the_input(spec):
    job_spec = spec(texts(50))
    done = await job(job_spec).run()
    found = read(job_spec.output)
    assert [row["id"] for row in found] == list(range(50))
    assert [row["generated_text"] for row in found] == [f"row {number}" for number in range(50)]
    assert (done.ended, done.ok, done.failed, done.waiting) == ("finished", 50, 0, 0)


def test_several_rows_read_their_pictures_at_a_time_and_stay_in_order():
    together = threading.Barrier(2, timeout=10)

    def make(row: InputRow) -> int:
        if row.number in (0, 40):  # the first waits for one that is further on
            together.wait()
        return row.number

    assert list(map_in_threads(make, (InputRow(n, {}) for n in range(1000)))) == list(range(1000))


async def test_a_template_makes_a_prompt_of_columns(spec):
    job_spec = spec([{"text": "this", "tags": ["a"]}], template="Say {text} {tags}", system="Be brief.")
    await job(job_spec).run()
    assert read(job_spec.output)[0]["generated_text"].endswith('Say this ["a"]')


async def test_a_row_whose_columns_are_empty_is_skipped_and_kept(spec):
    rows = [{"id": 0, "text": "this"}, {"id": 1, "text": None}, {"id": 2, "text": " "}]
    job_spec = spec(rows, template="Say {text}")
    done = await job(job_spec).run()
    assert (done.ended, done.ok, done.skipped, done.failed, done.run_retries) == ("finished", 1, 2, 0, 0)
    assert [(row["id"], row.get("generated_text"), row.get("error")) for row in read(job_spec.output)][
        1:
    ] == [
        (1, None, None),
        (2, None, None),
    ]
    assert (preview(spec([], "other.jsonl", template="Say {text}"))).skipped == 2


@pytest.mark.parity("X5")
async def test_bad_rows_of_every_kind_fail_alone(spec):
    bad = [
        "no json",
        "[1]",
        {"nothing": 1},
        {"prompt": 5},
        {"messages": [{"role": "wizard", "content": "x"}]},
    ]
    job_spec = spec([*texts(3), *bad, {"prompt": "x" * 90_000, "id": 8}])
    done = await job(job_spec).run()
    assert (done.ok, done.failed) == (3, 6)
    dead = read(job_spec.output.replace("out.jsonl", "out.failed.jsonl"))
    assert [row["error"]["stage"] for row in dead] == ["read"] * 2 + ["preprocess"] * 3 + ["engine"]
    assert dead[0]["line"] == "no json"
    assert dead[5]["error"]["code"] == "context_length_exceeded"


async def test_failures_of_one_code_are_told_apart_by_their_messages(spec):
    rows: list = [{"prompt": "x", "temperature": heat} for heat in ("hot", "cold", "warm")]
    rows += [{"prompt": "x", "temprature": 1}, "no json"]
    done = await job(spec(rows)).run()
    assert done.errors == {"invalid_request": 5}
    assert [(kind.count, kind.row) for kind in done.error_kinds] == [(3, 0), (1, 3), (1, 4)]
    assert done.error_kinds[1].message == "temprature is not known: did you mean temperature?"


@pytest.mark.parity("X5")
async def test_failed_rows_alone_are_run_again(spec):
    job_spec = spec(texts(20), max_attempts=1)
    first = await job(job_spec, engine={"error_every": 4}).run()
    assert (first.ok, first.failed) == (15, 5)
    second = await job(job_spec, retry_failed=True).run()
    assert (second.run_rows, second.ok, second.failed) == (5, 20, 0)
    assert [row["id"] for row in read(job_spec.output)] == list(range(20))
    assert not job_spec.output_path.with_name("out.failed.jsonl").exists()


@pytest.mark.parity("X5")
async def test_what_is_stopped_goes_on_where_it_was(spec):
    job_spec = spec(texts(60))
    slow = {"step_base_ms": 5, "max_num_seqs": 4}
    first = await job(job_spec, engine=slow, limits=Limits(tokens=60)).run()
    assert first.ended.startswith("budget: ")
    assert 0 < first.ok < 60
    assert not job_spec.output_path.exists()
    second = await job(job_spec).run()
    assert second.run_rows == 60 - first.ok
    assert [row["id"] for row in read(job_spec.output)] == list(range(60))


async def test_it_stops_when_too_many_rows_have_failed(spec):
    job_spec = spec([{"prompt": number} for number in range(5000)])
    done = await job(job_spec, limits=Limits(failures=10)).run()
    assert done.ended.startswith("budget: ")


async def test_a_stop_asked_twice_does_not_wait_for_rows(spec):
    class Impatient(ProgressListener):
        def on_tick(self, stats):
            if stats.running:
                work.stop.request("SIGINT")

    slow = {"step_base_ms": 50, "reply": "x" * 15_000}
    work = job(spec(texts(4), defaults={"max_tokens": 15_000}), engine=slow, listener=Impatient())
    done = await asyncio.wait_for(work.run(), 60)
    assert (done.ended, done.ok, done.waiting) == ("SIGINT", 0, 4)


async def test_rows_that_the_disk_lost_run_again_and_count_once(spec, patched):
    job_spec = spec(texts(10))
    segment = Path(job_spec.journal.url, "0001-engine-1.jsonl")

    def losing(*where):
        if segment.exists() and len(lines := segment.read_bytes().splitlines(keepends=True)) == 10:
            segment.write_bytes(b"".join(lines[:6]))
        return Index(*where)

    patched("penstock.data.job.job.Index", losing)
    work = job(job_spec)
    done = await work.run()
    assert (done.ok, done.run_rows, len(read(job_spec.output))) == (10, 14, 10)
    assert work.stats.before + work.stats.completed == 10


@pytest.mark.parity("X5")
async def test_no_engine_starts_when_only_the_output_is_missing(spec):
    job_spec = spec(texts(5))
    await job(job_spec).run()
    job_spec.output_path.remove()
    done = await job(job_spec, engine={"start_error": "no such weights"}).run()
    assert (done.ended, done.run_rows, len(read(job_spec.output))) == ("finished", 0, 5)


async def test_a_second_driver_is_refused(spec):
    job_spec = spec(texts(1))
    mine = acquire_lock(job_spec.journal)
    with pytest.raises(OutputLocked, match="works on this output already"):
        await job(job_spec).run()
    mine.release()
    assert (await job(job_spec).run()).ok == 1


async def test_a_changed_input_is_refused(spec, tmp_path: Path):
    job_spec = spec([{"prompt": "row"}, {"bad": 1}])
    await job(job_spec).run()
    (tmp_path / "in.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="has changed since this job began"):
        await job(job_spec).run()


async def test_a_job_without_any_answer_begins_anew_with_whatever_is_right(spec, tmp_path: Path):
    """Nothing is lost: its rows failed, or did not run. Its output and failed rows make room."""
    rows = [{"prompt": 5, "text": f"row {number}"} for number in range(3)]
    assert (await job(spec(rows)).run()).failed == 3
    job_spec = spec(rows, template="{text}", defaults={"max_tokens": 9})
    assert continued(job_spec) is None
    done = await job(job_spec).run()
    assert (done.ok, done.failed, done.rows) == (3, 0, 3)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]
    with pytest.raises(ConfigError, match=r"begun with prompt = '\{text\}'"):
        continued(spec(rows))


async def test_an_output_that_is_not_ours_is_left_alone(spec, tmp_path: Path):
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="was not written by `penstock batch`"):
        await job(spec(texts(1))).run()
    assert (tmp_path / "out.jsonl").read_text() == "precious"


async def test_an_output_within_its_input_is_refused(spec, tmp_path: Path):
    job_spec = spec(texts(1), "in.jsonl")
    with pytest.raises(ConfigError):
        await job(job_spec).run()


async def test_an_engine_that_cannot_start_ends_the_job_and_loses_nothing(spec):
    job_spec = spec(texts(3))
    with pytest.raises(EngineStartFailed, match="no such weights"):
        await job(job_spec, engine={"start_error": "no such weights"}).run()
    assert (await job(job_spec).run()).ok == 3


@pytest.mark.parity("X5")
async def test_an_engine_that_dies_is_made_anew_and_no_row_is_lost(spec):
    job_spec = spec(texts(60))
    done = await job(job_spec, engine={"die_after_requests": 25, "max_num_seqs": 8}).run()
    assert (done.ok, done.failed) == (60, 0)
    assert [row["id"] for row in read(job_spec.output)] == list(range(60))


@pytest.mark.parity("X5", "D12")
async def test_a_row_that_kills_engines_is_put_aside_alone(spec, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ENGINE_CLS", "poisoned:Poisoned")
    job_spec = spec([*texts(20), {"id": 20, "prompt": "poison"}, *texts(20)])
    done = await job(job_spec, engine={"step_base_ms": 1}).run()
    assert (done.ok, done.failed, done.errors) == (40, 1, {"poison_row": 1})
    (dead,) = read(job_spec.output.replace("out.jsonl", "out.failed.jsonl"))
    assert dead["prompt"] == "poison"


@pytest.mark.parity("X20")
async def test_identical_requests_without_chance_are_asked_once(spec):
    rows = [{"prompt": f"row {number % 3}", "temperature": 0} for number in range(12)]
    done = await job(spec(rows)).run()
    assert (done.ok, done.reused, done.generated_tokens) == (12, 9, 3 * 3)


@pytest.mark.parity("X20")
async def test_sampled_requests_are_asked_each_by_itself(spec):
    done = await job(spec([{"prompt": "same"}] * 4)).run()
    assert done.reused == 0


@pytest.mark.parity("X20")
@pytest.mark.parametrize(("reuse", "reused"), [("all", 3), ("off", 0)])
async def test_reuse_can_be_widened_and_switched_off(spec, reuse: str, reused: int):
    rows = [{"prompt": "same", **({"temperature": 0} if reuse == "off" else {})}] * 4
    assert (await job(spec(rows, reuse=reuse)).run()).reused == reused


@pytest.mark.parity("X20")
async def test_answers_of_another_job_are_taken_over(spec):
    rows = [{"prompt": f"row {number}", "seed": 1} for number in range(5)]
    first = spec(rows, "one.jsonl")
    await job(first).run()
    done = await job(spec(rows, "two.jsonl", reuse_from=first.output)).run()
    assert (done.ok, done.run_generated_tokens) == (5, 0)


@pytest.mark.parity("X20")
async def test_answers_of_other_sampling_are_not_taken_over(spec):
    first = spec([{"prompt": "x", "seed": 1}], "one.jsonl", defaults={"max_tokens": 1})
    await job(first).run()
    other = spec([], "two.jsonl", defaults={"max_tokens": 2}, reuse_from=first.output)
    assert (await job(other).run()).run_generated_tokens > 0


@pytest.mark.parity("D14", "X19")
async def test_the_report_counts_tokens_and_cost_over_all_runs(spec):
    job_spec = spec(texts(30))
    await job(job_spec, engine={"max_num_seqs": 4}, limits=Limits(tokens=40)).run()
    done: JobReport = await job(job_spec, prices=Prices(input=1.0, output=2.0)).run()
    assert done.generated_tokens == 30 * 3
    assert done.cost == pytest.approx((done.prompt_tokens + 2 * done.generated_tokens) / 1e6)


@pytest.mark.parity("X20")
async def test_answers_of_another_model_are_not_taken_over(spec):
    first = spec([{"prompt": "x", "seed": 1}], "one.jsonl", engines=EngineSpec(answers={"model": "a"}))
    await job(first).run()
    other = spec([], "two.jsonl", engines=EngineSpec(answers={"model": "b"}), reuse_from=first.output)
    assert (await job(other).run()).run_generated_tokens > 0


def engines(source: str = "s", preprocessor: object = None, **kwargs) -> EngineSpec:
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": source},
        engine_kwargs=kwargs,
        preprocessor=preprocessor,
    )
    return EngineSpec(cli_args=("m",), answers=engine_identity(config))


OTHER_ENGINES = [
    ({}, {"revision": "b"}, r"engine_kwargs\.revision was None, and is 'b'"),
    ({"dtype": "half"}, {}, r"engine_kwargs\.dtype was 'half', and is None"),
    ({}, {"source": "t"}, r"model\.model_source was 's', and is 't'"),
    ({}, {"preprocessor": "json:loads"}, "preprocessor was None, and is 'json:loads'"),
]


@pytest.mark.parametrize(("began", "now", "why"), OTHER_ENGINES)
async def test_answers_of_other_engines_are_not_taken_over(spec, began, now, why: str):
    first = spec([{"prompt": "x", "seed": 1}], "one.jsonl", engines=engines(**began))
    await job(first).run()
    other = spec([], "two.jsonl", engines=engines(**now), reuse_from=first.output)
    assert (await job(other).run()).run_generated_tokens > 0
    with pytest.raises(ConfigError, match=f"was begun with other engines.*{why}"):
        check_continuation(first, msgspec.structs.replace(first, engines=engines(**now)))


async def test_answers_by_an_engine_of_another_size_are_taken_over(spec):
    began, now = engines(max_num_seqs=4), engines(tensor_parallel_size=2, enforce_eager=True)
    first = spec([{"prompt": "x", "seed": 1}], "one.jsonl", engines=began)
    await job(first).run()
    other = spec([], "two.jsonl", engines=now, reuse_from=first.output)
    assert (await job(other).run()).run_generated_tokens == 0
    check_continuation(first, msgspec.structs.replace(first, engines=now))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("model/config.json", "model_source/config.json"),
        ("model/deep/weights", "model_source/deep/weights"),
        ("adapters/a/x", "dynamic_lora_loading_path/a/x"),
        ("t.jinja", "t.jinja"),
    ],
)
def test_a_local_file_that_changes_makes_other_engines(tmp_path: Path, monkeypatch, file: str, name: str):
    monkeypatch.chdir(tmp_path)
    for one in ("model/config.json", "model/deep/weights", "adapters/a/x", "t.jinja", "model/.git/x"):
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one).write_bytes(b"old" * (1 << 20 if one.endswith("weights") else 1))
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": str(tmp_path / "model")},
        lora_config={"dynamic_lora_loading_path": str(tmp_path / "adapters")},
        engine_kwargs={"chat_template": "t.jinja", "download_dir": str(tmp_path)},
    )
    before = engine_identity(config)
    (tmp_path / "model/.git/x").write_text("new")
    os.utime(tmp_path / "model/config.json", (1, 1))  # copied
    assert engine_identity(config) == before
    old = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(b"new" * (len(old) // 3))
    now = engine_identity(config)["files"]
    assert [one for one, version in now.items() if before["files"][one] != version] == [name]


def test_a_link_to_another_adapter_makes_other_engines(tmp_path: Path):
    for one in ("v1", "v2"):
        (tmp_path / one).mkdir()
        (tmp_path / one / "adapter_config.json").write_text(one)
    link = tmp_path / "adapters/a"
    link.parent.mkdir()
    (link.parent / "cycle").symlink_to(link.parent)
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        lora_config={"dynamic_lora_loading_path": str(link.parent)},
    )
    link.symlink_to(tmp_path / "v1")
    before = engine_identity(config)["files"]
    link.unlink()
    link.symlink_to(tmp_path / "v2")
    now = engine_identity(config)["files"]
    assert before.keys() == now.keys() == {"dynamic_lora_loading_path/a/adapter_config.json"}
    assert before != now


def test_a_new_adapter_beside_those_that_answered_changes_nothing(tmp_path: Path, spec):
    def with_adapters(*names: str) -> EngineSpec:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text(name)
        lora = {"dynamic_lora_loading_path": str(tmp_path)}
        config = LLMConfig(model_loading_config={"model_id": "m"}, lora_config=lora)
        return EngineSpec(cli_args=("m",), answers=engine_identity(config))

    first = spec([{"prompt": "x"}], engines=with_adapters("a"))
    check_continuation(first, msgspec.structs.replace(first, engines=with_adapters("b")))
    (tmp_path / "a" / "more").write_text("x")
    with pytest.raises(ConfigError, match="loading_path/a/more was None"):
        check_continuation(first, msgspec.structs.replace(first, engines=with_adapters()))


@pytest.mark.parametrize("changed", ["hooks/prepare.py", "hooks/words.py", "beside.py", "hooks/__init__.py"])
def test_what_a_hook_imports_belongs_to_what_answers_depend_on(tmp_path: Path, monkeypatch, changed: str):
    files = {
        "hooks/__init__.py": "",
        "hooks/prepare.py": "import json, penstock, torch\nfrom . import words\nimport beside\n1 / 0",
        "hooks/words.py": "WORD = 'a'",
        "beside.py": "",
        "other.py": "",
    }
    (tmp_path / "hooks").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = engines(preprocessor="hooks.prepare:prepare")
    assert set(before.identity["files"]) == {
        "hooks.py",
        "hooks.prepare.py",
        "hooks.words.py",
        "beside.py",
    }
    (tmp_path / changed).write_text("import os")
    now = engines(preprocessor="hooks.prepare:prepare")
    assert now.identity["files"] != before.identity["files"]


async def test_a_journal_that_does_not_say_what_its_answers_depend_on_is_refused(spec):
    older = spec([{"prompt": "x"}], engines=EngineSpec(cli_args=("m",)))
    await job(older).run()
    with pytest.raises(ConfigError, match=r"begun with other engines.* batch resume"):
        continued(msgspec.structs.replace(older, engines=engines()))
    assert continued(older) is not None


async def test_a_step_that_is_cancelled_leaves_no_task_behind(spec, tmp_path: Path):
    worker = job(spec([]))._pool.make_worker(storage_path(tmp_path), "0001-engine-1", RetryPolicy())
    await worker.start(no_progress)
    before = asyncio.all_tasks()
    step = asyncio.create_task(worker.step([], False))
    for _ in range(5):  # turns of the loop, after which it waits
        await asyncio.sleep(0)
    step.cancel()
    await asyncio.wait([step])
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    await worker.stop()


async def test_a_worker_that_is_stopped_gives_up_the_restart_of_its_engine(spec, tmp_path: Path):
    """It may take minutes; what it has begun must end before its backend is stopped."""
    told: list[str] = []

    class Dying:
        async def start(self, progress=no_progress):
            told.append("start")
            try:
                await asyncio.sleep(0 if len(told) == 1 else 600)
            except asyncio.CancelledError:
                told.append("given up")
                raise

        async def stop(self):
            told.append("stop")

        async def send(self, request):
            raise EngineDead("The engine died.")

        def available_slots(self, in_flight):
            return 1

    worker = InProcessPool(Dying).make_worker(storage_path(tmp_path), "0001-engine-1", RetryPolicy())
    await worker.start(no_progress)
    row = RowRequest(path="/v1/completions", body=b"{}")
    step = asyncio.create_task(worker.step([WorkItem(0, row)], False))
    await until(lambda: len(told) == 2)
    await step
    await worker.stop()
    assert told == ["start", "start", "given up", "stop"]


async def test_a_limit_runs_the_first_rows_only(spec):
    job_spec = spec(texts(30), limit=7)
    done = await job(job_spec).run()
    assert (done.ok, done.rows, done.waiting) == (7, 7, 0)
    assert len(read(job_spec.output)) == 7


async def test_an_empty_input_gives_an_empty_output(spec):
    job_spec = spec([])
    done = await job(job_spec).run()
    assert (done.ended, done.ok) == ("finished", 0)
    assert read(job_spec.output) == []


async def test_the_record_says_what_was_asked(spec):
    job_spec = spec(texts(1), engines=EngineSpec(cli_args=("m",)))
    await job(job_spec).run()
    found = manifest.read(job_spec.journal)
    assert found is not None
    assert (found.spec, found.total, found.stop_reason) == (job_spec, 1, "finished")


def test_a_preview_checks_every_row_and_shows_the_first_prompts(spec):
    job_spec = spec([*texts(5), {"prompt": 5}], template=None, defaults={"temperature": 0})
    found = preview(job_spec)
    assert (found.rows, found.good) == (6, 5)
    assert [number for number, _ in found.prompts] == [0, 1, 2]
    assert found.prompts[0][1] == "row 0"
    assert found.faults[0][0] == 5
    assert not Path(job_spec.journal.url).exists()


@pytest.mark.parametrize("template", ["no column", "open {brace", "{}"])
def test_a_template_that_names_no_column_is_refused(spec, template: str):
    with pytest.raises(ConfigError, match="The prompt"):
        preview(spec(texts(1), template=template))


def test_a_missing_column_is_named(spec):
    found = preview(spec(texts(1), template="{text}"))
    assert found.faults == [(0, "The prompt names the column 'text'; the row has id, prompt.")]


@pytest.mark.parity("X18")
async def test_beginnings_brought_together_are_computed_once(spec):
    """Forty beginnings in turn, of which the cache holds three."""
    rows = [
        {"prompt": f"{number % 40} " + f"begin{number % 40} " * 150 + str(number)} for number in range(400)
    ]
    engine = {
        "kv_tokens": 1024,
        "max_model_len": 512,
        "max_num_seqs": 2,
        "enable_prompt_tokens_details": True,
    }
    together = await job(spec(rows, "one.jsonl"), engine=engine).run()
    apart = await job(spec(rows, "two.jsonl", group_prefixes=False), engine=engine).run()
    assert together.ok == apart.ok == 400
    assert together.cached_tokens > 0.8 * together.prompt_tokens
    assert apart.cached_tokens < 0.1 * apart.prompt_tokens


@pytest.mark.parity("X5")
async def test_a_row_that_breaks_its_template_fails_alone(spec):
    rows = [{"price": 1.5}, {"price": "cheap"}, {"price": {"title": 1}}, {"price": 2}]
    job_spec = spec(rows, template="It costs {price:.2f}")
    done = await job(job_spec).run()
    assert (done.ok, done.failed) == (2, 2)
    dead = read(job_spec.output.replace("out.jsonl", "out.failed.jsonl"))
    assert dead[0]["error"]["code"] == "invalid_request"
    assert dead[0]["error"]["message"].startswith("The prompt cannot be made of the row: Unknown format code")


async def test_a_row_that_breaks_our_own_code_fails_alone(spec, patched):
    from penstock.data.job import pending

    real = pending.build_request

    def broken(fields, *rest):
        if fields["id"] == 1:
            raise ArithmeticError("sampling_rate is 0")
        return real(fields, *rest)

    patched(pending, "build_request", broken)
    job_spec = spec(texts(3))
    done = await job(job_spec).run()
    assert (done.ok, done.errors) == (2, {"own_code_failed": 1})
    (dead,) = read(job_spec.output.replace("out.jsonl", "out.failed.jsonl"))
    assert dead["error"]["message"] == "ArithmeticError: sampling_rate is 0"


async def test_what_a_row_lacks_is_empty_in_its_prompt(spec):
    rows = [{"text": "a", "n": None, "deep": {"x": None}}, {"text": None, "n": 2, "deep": {"x": 1}}]
    job_spec = spec(rows, template="<{text!s}|{n:>3}|{deep[x]}>")
    await job(job_spec).run()
    assert [row["generated_text"] for row in read(job_spec.output)] == ["<a||>", "<|  2|1>"]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [("{a.b}", "one"), ("{a[b]}", "two"), ("{c.d}{c.e[0]}", "three4"), ("{a.b!r}", "'one'")],
)
async def test_names_in_braces_are_columns_and_what_is_in_them(spec, template: str, prompt: str):
    job_spec = spec([{"a.b": "one", "a": {"b": "two"}, "c": {"d": "three", "e": [4]}}], template=template)
    await job(job_spec).run()
    assert [row["generated_text"] for row in read(job_spec.output)] == [prompt]


@pytest.mark.parametrize("template", ["{prompt.upper}", "{prompt:.2q}", "{prompt.__class__}"])
async def test_a_template_that_fits_no_row_is_refused_before_any_row_fails(spec, template: str):
    with pytest.raises(ConfigError, match="No row goes into the text of --prompt"):
        await job(spec(texts(3), template=template)).run()


async def test_columns_that_are_sent_as_parameters_are_told(spec):
    told: list[str] = []

    class Listener(ProgressListener):
        def on_message(self, text: str) -> None:
            told.append(text)

    await job(spec([{"prompt": "x", "n": 1, "id": 3}]), listener=Listener()).run()
    assert "Columns taken as parameters of the requests: n." in told


async def test_a_limit_that_is_reached_with_the_last_row_stops_nothing(spec):
    job_spec = spec(texts(3))
    assert (await job(job_spec, limits=Limits(tokens=18)).run()).ended == "finished"


async def test_the_state_of_a_job_says_why_it_failed(spec, monkeypatch, patched):
    def refused(*_: object) -> None:
        raise Unavailable("no key")

    job_spec = spec(texts(3))
    patched("penstock.data.job.job.OutputWriter.write", refused)
    with pytest.raises(Unavailable):
        await job(job_spec).run()
    found = manifest.read(job_spec.journal)
    assert found is not None
    assert found.stop_reason == "failed: no key"
    monkeypatch.undo()
    assert (await job(job_spec).run()).run_rows == 0


async def test_an_answer_that_breaks_our_own_code_fails_its_row_alone(spec, patched):
    from penstock.data.execution import window

    real = window.classify_response

    def broken(answer, attempts):
        if b"row 1" in answer.body:
            raise ArithmeticError("odd")
        return real(answer, attempts)

    patched(window, "classify_response", broken)
    done = await job(spec(texts(3))).run()
    assert (done.ok, done.errors) == (2, {"internal_error": 1})


def answers(folder: Path) -> list[str]:
    return [row["generated_text"] for row in read(str(folder / "answers.jsonl"))]


@pytest.mark.parity("X5")
@pytest.mark.parametrize("inputs", ["data/*.jsonl", "data", "data/**/*.jsonl", "data/../data/*.jsonl"])
async def test_an_output_beside_its_inputs_goes_on_at_every_moment(tmp_path: Path, inputs: str):
    """Killed at its start, in its middle, and before its output was whole; and then asked to retry."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": "row 0"}, {"bad": 1}, *({"prompt": f"row {number}"} for number in range(2, 40))]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job_spec = JobSpec(inputs=(str(tmp_path / inputs),), output=str(folder / "answers.jsonl"))
    await job(job_spec, limits=Limits(seconds=0.0)).run()
    slow = {"step_base_ms": 5, "max_num_seqs": 4}
    await job(job_spec, engine=slow, limits=Limits(tokens=20)).run()
    done = await job(job_spec).run()
    assert (done.ok, done.failed, done.rows) == (39, 1, 40)
    for retry in (False, True):
        again = await job(job_spec, retry_failed=retry).run()
        assert (again.ok, again.failed, again.rows) == (39, 1, 40)
    assert answers(folder) == ["row 0", *(f"row {number}" for number in range(2, 40))]


async def test_a_folder_of_parts_within_its_input_goes_on(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    job_spec = JobSpec(inputs=(str(tmp_path),), output=f"{tmp_path}/out/")
    for _ in range(2):
        assert (await job(job_spec).run()).rows == 1


async def test_an_output_that_is_named_as_input_is_refused_by_whatever_path(spec, tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    job_spec = spec(texts(1), "link/in.jsonl")
    with pytest.raises(ConfigError, match="would be both input and output"):
        await job(job_spec).run()


async def test_files_where_failed_rows_would_go_are_left_alone(spec, tmp_path: Path):
    precious = tmp_path / "out.failed.jsonl"
    precious.write_text("precious")
    with pytest.raises(ConfigError, match=r"out\.failed\.jsonl' exists, where this job would write"):
        await job(spec(texts(1))).run()
    precious.unlink()
    assert (await job(spec(texts(1))).run()).ok == 1
    with pytest.raises(ConfigError, match=r"out\.jsonl' is the output of another job"):
        await job(JobSpec(inputs=spec([]).inputs, output=f"{tmp_path}/out/")).run()


async def test_an_empty_folder_may_be_the_output(spec, tmp_path: Path):
    (tmp_path / "out").mkdir()
    job_spec = JobSpec(inputs=spec(texts(1)).inputs, output=f"{tmp_path}/out/")
    assert (await job(job_spec).run()).ok == 1


@pytest.mark.parametrize("change", ["other", "shorter", "longer"])
async def test_an_input_that_changes_while_it_runs_gives_no_output(spec, tmp_path: Path, change: str):
    class Meddling(ProgressListener):
        def on_phase(self, worker: str, phase: str):
            if phase == "gone":
                kept = {"other": 30, "shorter": 10, "longer": 50}[change]
                lines = [json.dumps({"id": -number, "prompt": "x"}) for number in range(kept)]
                (tmp_path / "new").write_text("\n".join(lines))
                (tmp_path / "new").rename(tmp_path / "in.jsonl")

    job_spec = spec(texts(30))
    before = (tmp_path / "in.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"in\.jsonl' has changed"):
        await job(job_spec, listener=Meddling()).run()
    assert not job_spec.output_path.exists()
    (tmp_path / "in.jsonl").write_bytes(before)
    done = await job(job_spec, engine={"start_error": "not needed"}).run()
    assert (done.ok, done.run_rows, len(read(job_spec.output))) == (30, 0, 30)


async def test_an_input_that_changes_while_the_output_is_written_does_not_pass_for_that_of_the_answers(
    spec, tmp_path: Path, monkeypatch
):
    write = OutputWriter.write

    def changed(self: OutputWriter, index: Index) -> list[str]:
        (tmp_path / "in.jsonl").write_text('{"id": 9, "prompt": "other"}\n')
        return write(self, index)

    job_spec = spec(texts(1))
    before = (tmp_path / "in.jsonl").read_bytes()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(OutputWriter, "write", changed)
        with pytest.raises(ConfigError, match="The input has changed since this job began"):
            await job(job_spec).run()
    assert not manifest.read(job_spec.journal).finished
    (tmp_path / "in.jsonl").write_bytes(before)
    assert (await job(job_spec).run()).ended == "finished"
    assert [(row["id"], row["generated_text"]) for row in read(job_spec.output)] == [(0, "row 0")]


async def test_an_input_that_was_copied_is_the_same(spec, tmp_path: Path):
    job_spec = spec(texts(3))
    await job(job_spec, limits=Limits(seconds=0.0)).run()
    path = tmp_path / "in.jsonl"
    os.utime(path, (1, 1))
    assert (await job(job_spec).run()).ok == 3
    path.write_bytes(path.read_bytes().replace(b"row 1", b"now 1"))
    with pytest.raises(ConfigError, match="has changed"):
        await job(job_spec).run()


async def test_a_template_that_misses_every_row_is_refused_at_once(spec):
    job_spec = spec([{"id": 1, "question": "x"}], template="Say {questoin}")
    with pytest.raises(ConfigError, match=r"column 'questoin'; the input has 'id', 'question'\. Did you"):
        await job(job_spec).run()
    assert (await job(spec([], template="Say {question}")).run()).ok == 1


async def test_rows_without_any_input_are_refused_at_once(spec):
    with pytest.raises(ConfigError, match=r"no `messages`.*have 'question'\. --prompt makes one of columns"):
        await job(spec([{"question": "x"}] * 3)).run()
    assert (await job(spec([], template="Say {question}")).run()).ok == 3


async def test_a_system_prompt_is_filled_in_as_the_prompt_is(spec):
    rows = [{"text": "a", "tone": "brief"}, {"text": None, "tone": "kind"}]
    found = preview(spec(rows, template="Say {text}", system="Be {tone}, {{x}}"))
    assert (found.good, found.skipped) == (1, 1)
    assert '"Be brief, {x}"' in found.prompts[0][1]
    with pytest.raises(ConfigError, match=r"The system prompt names the column 'tune'.*Did you mean 'tone'"):
        await job(spec([], "two.jsonl", template="Say {text}", system="Be {tune}")).run()
    with pytest.raises(ConfigError, match=r"The system prompt .* is not a template"):
        preview(spec([], "two.jsonl", template="Say {text}", system="Answer {"))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"temprature": 0}, "temprature is not known: did you mean temperature?"),
        ({"foo": 1}, "foo is not known; known are .*`extra_body` sends any field"),
        ({"temperature": "hot"}, "temperature is 'hot', a str; it must be a number"),
        ({"sampling_params": {"temprature": 0}}, "sampling_params.temprature is not known"),
    ],
)
async def test_a_parameter_for_all_rows_is_checked_before_the_first(spec, params: dict, why: str):
    with pytest.raises(ConfigError, match=f"--param: {why}"):
        await job(spec(texts(1), defaults=params)).run()
    good = {"temperature": 0, "max_new_tokens": 9, "extra_body": {"foo": 1}, "model": "m"}
    assert (await job(spec(texts(1), defaults=good)).run()).ok == 1


async def test_a_template_that_misses_some_rows_fails_them_alone(spec):
    done = await job(spec([{"a": 1}, {"b": "x"}], template="Say {b}")).run()
    assert (done.ok, done.failed) == (1, 1)


async def test_a_csv_file_of_another_separator_is_told(tmp_path: Path):
    (tmp_path / "in.csv").write_text("a;b\n1;2\n")
    job_spec = JobSpec(inputs=(str(tmp_path / "in.csv"),), output=str(tmp_path / "out.csv"), template="{a}")
    with pytest.raises(ConfigError, match="separated by commas"):
        await job(job_spec).run()


LINE = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


async def test_two_lines_with_one_id_are_refused(spec):
    job_spec = spec([{**LINE, "custom_id": name} for name in ("a", "b", "a")])
    with pytest.raises(ConfigError, match="Rows 0 and 2 have the same custom_id, 'a'"):
        await job(job_spec).run()


async def test_lines_are_known_by_the_first_row_that_can_be_read(spec):
    job_spec = spec(["broken", {**LINE, "custom_id": "a"}])
    await job(job_spec).run()
    assert read(job_spec.output)[0]["custom_id"] == "a"


async def test_what_cannot_be_run_leaves_nothing_to_go_on_with(spec):
    """So that the command can be put right, and given again for the same output."""
    for wrong in (
        {"template": "{nothing}"},
        {"kind": "score", "template": "{id}"},
        {"reuse_from": "none.jsonl"},
    ):
        with pytest.raises(ConfigError):
            await job(spec(texts(1), **wrong)).run()
    assert (await job(spec(texts(1))).run()).ok == 1


async def test_a_bucket_that_takes_no_last_object_ends_the_job(tmp_path: Path, monkeypatch, patched):
    """No other line follows that could meet the error: every row waits to be kept."""
    written = RemotePath.write

    def write(self, data: bytes) -> None:
        if "engine" in self.url and refuses:
            raise Unavailable("The credentials have expired.")
        written(self, data)

    patched(RemotePath, "write", write)
    storage_path(f"memory://{tmp_path.name}/in.jsonl").write(b'{"prompt": "x"}\n')
    job_spec = JobSpec(
        inputs=(f"memory://{tmp_path.name}/in.jsonl",), output=f"memory://{tmp_path.name}/out.jsonl"
    )
    monkeypatch.setattr("penstock.data.journal.lock.HEARTBEAT_S", 0.1)
    for refuses in (True, False):
        if refuses:
            with pytest.raises(Unavailable, match="journal cannot be written: The credentials have expired"):
                await asyncio.wait_for(job(job_spec).run(), 60)
        else:
            assert (await job(job_spec).run()).ok == 1


async def test_a_pipeline_whose_journal_breaks_is_told():
    error = Unavailable("The credentials have expired.")
    storage_path("memory://memory-breaks/x").write(b"")

    async def ask() -> Outcome:
        return Outcome(state="ok", body=msgspec.Raw(b"{}"))

    with pytest.MonkeyPatch.context() as patch:
        memory = AnswerCache("memory://memory-breaks")
        patch.setattr(RemotePath, "write", Mock(side_effect=error))
        with pytest.raises(Unavailable, match="The credentials have expired"):
            await asyncio.wait_for(memory.get_or_run(CacheKey("key", is_sampled=False), ask), 60)


@pytest.mark.parametrize("body", [b'{"choices": []}', b'{"data": []}', b'{"choices": [{"index": "x"}]}'])
async def test_an_answer_of_another_form_is_a_failure_that_can_be_retried(spec, monkeypatch, body: bytes):
    real = InProcessEngine.send

    async def odd(self, request):
        return Response(200, body) if b"row 1" in request.body else await real(self, request)

    job_spec = spec(texts(3))
    with monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "send", odd)
        done = await job(job_spec).run()
    assert (done.ok, done.errors, done.retry_may_help) == (2, {"bad_answer": 1}, True)
    assert (await job(job_spec, retry_failed=True).run()).ok == 3


async def test_a_worker_that_only_dies_is_given_up_however_well_others_work(spec):
    class Dying:
        async def start(self, progress):
            return

        async def step(self, leases, hungry):
            await asyncio.sleep(0.01)
            raise WorkerLost("The process of engine-2 has died.")

        async def stop(self):
            return []

    class Mixed(InProcessPool):
        size = 2
        died = 0

        def make_worker(self, journal, segment, retry_policy):
            if "engine-1" in segment:
                return super().make_worker(journal, segment, retry_policy)
            self.died += 1
            return Dying()

    engine = {"step_base_ms": 5, "max_num_seqs": 2}
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=engine)
    pool = Mixed(lambda: InProcessEngine(config))
    done = await Job(spec(texts(60)), pool).run()
    assert (done.ok, done.failed, pool.died) == (60, 0, 3)


async def test_a_worker_whose_start_is_given_up_is_stopped_after_that(spec):
    told: list[str] = []

    class Slow:
        async def start(self, progress):
            running.stop.request("enough")
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)
                told.append("start has ended")

        async def stop(self):
            told.append("stop")
            return []

    class Pool(InProcessPool):
        def make_worker(self, journal, segment, retry_policy):
            return Slow()

    running = Job(spec(texts(1)), Pool(Mock()))
    assert (await running.run()).ended == "enough"
    assert told == ["start has ended", "stop"]


async def test_who_lost_the_output_to_another_driver_writes_nothing(spec, patched):
    class Lost:
        def lost(self) -> bool:
            return bool(list(Path(job_spec.journal.url).glob("*engine*")))

        def check(self) -> None:
            if self.lost():
                raise lost_lock(job_spec.journal)

        def release(self) -> None: ...

    patched("penstock.data.job.job.acquire_lock", lambda journal: Lost())
    job_spec = spec(texts(3))
    with pytest.raises(OutputLocked, match="Another driver has taken over this output"):
        await job(job_spec).run()
    assert not job_spec.output_path.exists()
    assert manifest.read(job_spec.journal).stop_reason is None


async def test_a_listener_that_fails_ends_the_job_and_no_row_is_lost(spec):
    """It is called by what looks after the lock, which then looked no more."""

    class Careless(ProgressListener):
        def on_tick(self, stats: RunStats) -> None:
            raise ZeroDivisionError("of theirs")

    job_spec = spec(texts(1), defaults={"max_tokens": 15_000})
    slow = {"step_base_ms": 50, "reply": "x" * 15_000}
    with pytest.raises(ZeroDivisionError):
        await job(job_spec, engine=slow, listener=Careless()).run()
    assert manifest.read(job_spec.journal).stop_reason == "failed: of theirs"
    assert (await job(job_spec).run()).ok == 1


async def test_a_job_whose_journal_is_removed_ends_and_adds_nothing_to_the_next_one(spec):
    """As users are told to do to begin anew, who may forget a job that still runs."""
    job_spec = spec(texts(12))
    first = job(job_spec, engine={"step_base_ms": 5, "max_num_seqs": 1})
    running = asyncio.create_task(first.run())
    await until(lambda: first.stats.completed)
    shutil.rmtree(job_spec.journal.url)
    other = msgspec.structs.replace(job_spec, template="Other {prompt}")
    assert (await job(other).run()).ok == 12
    with pytest.raises(OutputLocked, match="or its journal was removed"):
        await running
    assert all("Other row" in row["generated_text"] for row in read(job_spec.output))
    assert manifest.read(job_spec.journal).finished


async def test_a_job_that_is_cancelled_while_it_takes_its_lock_leaves_the_output_free(spec, patched):
    asked, go, taken = threading.Event(), threading.Event(), threading.Event()

    def slowly(journal: LocalPath):
        asked.set()
        go.wait(10)
        lock = acquire_lock(journal)
        taken.set()
        return lock

    patched("penstock.data.job.job.acquire_lock", slowly)
    job_spec = spec(texts(1))
    running = asyncio.create_task(job(job_spec).run())
    await asyncio.to_thread(asked.wait, 10)
    running.cancel()
    asyncio.get_running_loop().call_later(0.1, go.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(taken.wait, 10)
    acquire_lock(job_spec.journal).release()


def test_a_template_of_the_model_that_refuses_a_row_is_its_fault(spec, patched):
    class Template:
        def apply_chat_template(self, messages, **options):
            raise ValueError("System role not supported")

    patched("penstock.data.job.preview._load_template", lambda config: (Template(), ""))
    found = preview(spec([{"messages": [{"role": "user", "content": "x"}]}]))
    assert (found.good, found.faults) == (
        0,
        [(0, "The model's chat template refuses the row: System role not supported")],
    )


async def test_a_service_that_never_answers_is_not_waited_for_without_end(patched):
    made = Mock()
    patched("penstock.data.backends.openai_service.OpenAIService", made)
    make_worker_pool(EngineSpec(url="http://x"), None).make_worker(
        storage_path("/nowhere"), "a", RetryPolicy()
    )
    assert 600 <= made.call_args.kwargs["timeout_s"] <= 3600


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ({}, False),
        ({"tokenizer_config.json": "{}"}, True),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, False),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "x"}, False),
        ({"tokenizer_config.json": "{}", "tekken.json": "x"}, False),
    ],
)
def test_a_folder_without_a_chat_template_is_known(tmp_path: Path, files: dict[str, str], lacks: bool):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    model = {"model_id": "m", "model_source": str(tmp_path)}
    assert lacks_chat_template(LLMConfig(model_loading_config=model)) is lacks
    with_own = LLMConfig(model_loading_config=model, engine_kwargs={"chat_template": "x"})
    assert not lacks_chat_template(with_own)


async def test_a_prompt_is_a_message_where_nothing_else_is_asked_for(spec):
    rows = [
        {"prompt": "a"},
        {"prompt": [1, 2]},
        {"prompt": "b", "suffix": "c"},
        {"messages": [], "prompt": "d"},
    ]
    found = preview(spec(rows, prompts_as_messages=True))
    assert ["messages" in text for _, text in found.prompts] == [True, False, False]
    assert [number for number, _ in found.faults] == [3]
    assert "messages" not in preview(spec(rows)).prompts[0][1]


SIM = LLMConfig(
    model_loading_config={"model_id": "m"},
    llm_engine="sim",
    engine_kwargs={"max_num_seqs": 4},
    runtime_env={"env_vars": {"HF_TOKEN": "hf_secret", "A": "b"}},
)


@pytest.fixture
def in_process(patched):
    """`batch()` with its engine in this process."""
    patched(
        "penstock.data.job.api.make_worker_pool",
        lambda engines, config, **_: InProcessPool(lambda: InProcessEngine(config)),
    )


def test_a_job_from_python_can_go_on_by_the_command(tmp_path: Path, monkeypatch, in_process):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    batch("in.jsonl", "out.jsonl", config=SIM, params={"stop": ("a",)}, limits=Limits(seconds=0.0))
    spec = Job.load_spec(str(tmp_path / "out.jsonl"))
    assert (spec.inputs, spec.output) == ((f"{tmp_path}/in.jsonl",), f"{tmp_path}/out.jsonl")
    found = config_of(spec.engines)
    assert (found.engine_kwargs["max_num_seqs"], found.runtime_env) == (4, {"env_vars": {"A": "b"}})
    assert "hf_secret" not in (tmp_path / "out.jsonl.journal/job.json").read_text()
    assert batch("in.jsonl", "out.jsonl", config=SIM, params={"stop": ("a",)}).ok == 1


@pytest.mark.parametrize("form", [None, "jsonl"])
async def test_a_job_without_any_input_is_refused(tmp_path: Path, form: str | None):
    """As of a program whose pattern matches no file."""
    async with asyncio.timeout(10):
        with pytest.raises(ConfigError, match="The job has no input"):
            await job(JobSpec(inputs=(), output=str(tmp_path / "out.jsonl"), input_form=form)).run()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("own", [signal.default_int_handler, lambda signum, frame: None])
def test_a_program_has_its_own_handlers_of_signals_again_after_a_job(tmp_path: Path, in_process, own):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    before = {signum: signal.signal(signum, own) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), config=SIM)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_a_job_that_another_command_has_begun_meanwhile_is_not_taken_over(tmp_path: Path, patched):
    """Two commands on one output find none there; the second takes its lock when the first has ended."""
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    output = str(tmp_path / "out.jsonl")
    others: list[str] = ["First {text}"]

    def pool(engines, config, **_: object):
        if others:
            batch(str(tmp_path / "in.jsonl"), output, config=SIM, prompt=others.pop())
        return InProcessPool(lambda: InProcessEngine(config))

    patched("penstock.data.job.api.make_worker_pool", pool)
    with pytest.raises(ConfigError, match=r"was begun with prompt = 'First \{text\}', not 'Second"):
        batch(str(tmp_path / "in.jsonl"), output, config=SIM, prompt="Second {text}")
    assert "First x" in read(output)[0]["generated_text"]
    assert Job.load_spec(output).template == "First {text}"


def test_a_config_that_a_journal_cannot_hold_goes_on_from_python_only(tmp_path: Path, in_process):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    odd = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        engine_kwargs={"prefill_tokens_per_s": float("inf")},
    )
    files = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    batch(*files, config=odd, limits=Limits(seconds=0.0))
    with pytest.raises(ConfigError, match=r"Call batch\(\) again as before"):
        config_of(Job.load_spec(files[1]).engines)
    assert batch(*files, config=odd).ok == 1


def test_parameters_that_could_not_be_kept_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="params: temperature is nan"):
        batch("in.jsonl", str(tmp_path / "out.jsonl"), config=SIM, params={"temperature": float("nan")})


async def test_no_secret_is_kept_and_the_same_command_goes_on(spec):
    job_spec = spec(texts(1))
    words = ("m", "--hf-token", "hush1", "--api-key=hush2", "--max-model-len", "9")
    secret = msgspec.structs.replace(
        job_spec,
        inputs=(*job_spec.inputs, f"file://{job_spec.inputs[0]}"),
        engines=EngineSpec(cli_args=words, url="http://user:hush3@host/v1"),
    )
    await job(secret, limits=Limits(seconds=0.0)).run()
    assert b"hush" not in (job_spec.journal / "job.json").read()
    found = manifest.read(job_spec.journal).spec
    assert found.engines.cli_args == ("m", "--max-model-len", "9")
    check_continuation(found, secret)
    with pytest.raises(ConfigError, match="holds no passwords"):
        manifest.check_resumable(found)


async def test_an_input_by_a_signed_url_is_read_by_it(tmp_path: Path, monkeypatch):
    """What may be shown of it opens nothing."""
    opened: list[str] = []
    real = RemotePath.at.__func__

    def at(cls, url: str):
        opened.append(url)
        return real(cls, url)

    monkeypatch.setattr(RemotePath, "at", classmethod(at))
    storage_path("memory://signed.jsonl?sig=s3cret").write(b'{"prompt": "x"}\n')
    job_spec = JobSpec(inputs=("memory://signed.jsonl?sig=s3cret",), output=str(tmp_path / "out.jsonl"))
    assert (await job(job_spec).run()).ok == 1
    assert set(opened) == {"memory://signed.jsonl?sig=s3cret"}
    assert b"s3cret" not in (job_spec.journal / "job.json").read()


async def test_the_journal_of_another_job_is_closed_in_the_end(spec):
    first = spec([{"prompt": "x", "seed": 1}], "one.jsonl")
    await job(first).run()
    await job(spec([], "two.jsonl", reuse_from=first.output)).run()
    assert open_files("one.jsonl.journal") == []


def open_files(part: str) -> list[str]:
    """Those of this process whose paths have this part."""
    links = [Path(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    return [to for one in links if one.is_symlink() and part in (to := os.readlink(one))]


async def test_an_output_that_cannot_be_written_leaves_no_file_of_the_journal_open(spec):
    class Full(ProgressListener):
        def on_writing(self) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(Unavailable, match="File too large"):
            await job(spec(texts(3)), listener=Full()).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files("out.jsonl.journal") == []


async def test_rows_of_strangers_read_no_files(spec, tmp_path: Path):
    content = [{"type": "image", "image": str(tmp_path / "secret")}]
    job_spec = spec([{"messages": [{"role": "user", "content": content}]}], read_files=False)
    assert (await job(job_spec).run()).failed == 1
    (failed,) = read(str(tmp_path / "out.failed.jsonl"))
    assert "files are not read here" in failed["error"]["message"]
