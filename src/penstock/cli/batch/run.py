"""`penstock batch` inside its guard: plans, runs and reports a job; and shows the state of any job."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console

from penstock.cli.batch.options import RunOptions
from penstock.cli.batch.terminal import Meter, shown, table_of
from penstock.cli.models import precheck
from penstock.cli.models.engine_arguments import read_engine_words
from penstock.cli.models.options import ACCELERATOR_KINDS, API_KEY_NAMES, Arguments, CommandOptions, Engine
from penstock.cli.models.plan import ServePlan, make_plan
from penstock.cli.process.output import Output, redirect_output
from penstock.config import LLMConfig
from penstock.data.backends.engine_config import engine_identity, lacks_chat_template
from penstock.data.job import manifest
from penstock.data.job.api import make_worker_pool
from penstock.data.job.job import Job
from penstock.data.job.preview import preview
from penstock.data.job.report import BUDGET, JobReport, Limits, Prices, RunStats, report
from penstock.data.job.spec import EngineSpec, JobSpec
from penstock.data.job.validation import check_continuation, continued, find_job_input, finished_report
from penstock.data.journal.index import Index
from penstock.data.journal.lock import is_locked
from penstock.data.storage.paths import StoragePath
from penstock.errors import ConfigError, EngineStartFailed, Error, SourceNotFound, reason
from penstock.processes.tree import end_descendants
from penstock.temporary_folder import temporary_folder

STOP_S = 90.0
"""From the first signal until the guard kills: rows that run may end, engines stop."""

_FAILED, _BAD_CONFIG, _STOPPED = 1, 2, 3
_ONE_SIGNAL_S = 1.0


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run. spec: None to continue the job of `output`; then url is as given to `resume`."""

    output: str
    command: CommandOptions
    options: RunOptions
    spec: JobSpec | None = None
    engines: EngineSpec | None = None
    url: str | None = None
    api_key: str | None = None
    retry_failed: bool = False


def run(batch_run: BatchRun, signals_fd: int) -> int:
    """Exit code: 0 when the output is there; 3 when a limit stopped it, 128 + signal when a signal did, 1 for
    a failure, 2 for options that cannot be followed. Other than 0, it comes with a sentence on stderr.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="penstock-batch-"))
        output = redirect_output(None if batch_run.options.verbose else folder / "batch.log")
    except OSError as error:
        print(f"penstock batch: no log can be written: {_os_error(error)}. Set TMPDIR.", file=sys.stderr)
        return _FAILED
    try:
        code = _run(batch_run, signals_fd, output)
    except Exception as error:
        code = _explain(error, output)
    if code != _FAILED:
        shutil.rmtree(folder, ignore_errors=True)
    end_descendants()
    return code


def _run(batch_run: BatchRun, signals_fd: int, output: Output) -> int:
    spec = _spec(batch_run)
    options = batch_run.options
    if options.report is not None and not (folder := Path(options.report).parent).is_dir():
        raise ConfigError(f"--report {options.report}: there is no folder '{folder}'.")
    if manifest.read(spec.journal) is None:
        find_job_input(spec)  # before an engine is asked, and Ray imported
    if (plan := plan_of(spec.engines)) is not None:
        plan = precheck.checked(plan, spec.engines.address, batch_run.command)
    if (config := config_of(spec.engines, plan)) is not None:
        engines = msgspec.structs.replace(spec.engines, answers=engine_identity(config))
        spec = msgspec.structs.replace(spec, engines=engines)
        if batch_run.spec is not None:
            spec = _without_chat(spec, config)
    names_engines = batch_run.engines is not None and batch_run.engines.answers is None
    before = continued(spec, with_other_engines=names_engines)
    if (done := finished_report(before, spec, retry_failed=batch_run.retry_failed)) is not None:
        print(f"penstock batch: '{batch_run.output}' is finished; nothing was run.", file=output.err)
        return _ended(batch_run, done, output, whole=False)
    given = options.price_input, options.price_output
    prices = Prices(given[0] or 0.0, given[1] or 0.0) if given != (None, None) else None
    meter = Meter(output.err)
    with meter.bar:
        pool = make_worker_pool(
            spec.engines,
            config,
            kind=spec.kind,
            api_key=batch_run.api_key,
            verbose=options.verbose,
            on_message=meter.on_message,
        )
        job = Job(
            spec,
            pool,
            limits=Limits(options.max_seconds, options.max_total_tokens, options.max_failures),
            listener=meter,
            prices=prices,
            retry_failed=batch_run.retry_failed,
            check=lambda began: None if names_engines else check_continuation(began, spec),
        )
        done = asyncio.run(_signalled(job, signals_fd, meter))
    return _ended(batch_run, done, output)


def _ended(batch_run: BatchRun, done: JobReport, output: Output, *, whole: bool = True) -> int:
    """Shows the report. Gives the exit code."""
    console = Console(file=output.out, highlight=False)
    if batch_run.options.limit is not None and done.ended == manifest.FINISHED and console.is_terminal:
        console.print(*table_of(done.files[0]), sep="\n", markup=False)
    print("\n".join(shown(done, whole=whole)), file=output.out)
    if batch_run.options.report is not None:
        Path(batch_run.options.report).write_bytes(msgspec.json.format(msgspec.json.encode(done)) + b"\n")
    code = _code(done, fail_on_errors=batch_run.options.fail_on_errors)
    if code:
        print(f"penstock batch: {_why(done)}", file=output.err)
    return code


def _why(done: JobReport) -> str:
    """Why a job that has ended by itself did not succeed."""
    if done.ended != manifest.FINISHED:
        rows = "Rows" if done.waiting is None else f"{done.waiting:,} rows"
        return f"stopped ({done.ended}); {rows} are left. Resume: penstock batch resume {done.output}"
    how_many = f"{done.failed:,} of {done.rows or 0:,} rows failed"
    example = next((f", such as {kind.code}: {kind.message}" for kind in done.error_kinds), "")
    return f"{how_many} (they are in '{done.files[-1]}'){example}"


def _spec(batch_run: BatchRun) -> JobSpec:
    """What to run. Raises: ConfigError."""
    spec = batch_run.spec
    if spec is None:
        spec = Job.load_spec(batch_run.output)
        if batch_run.engines is not None:
            engines, before = batch_run.engines, spec.engines
            if engines.url is not None and engines.url == before.url:  # with the same model and concurrency
                model = engines.model or before.model
                engines = msgspec.structs.replace(engines, model=model, concurrency=before.concurrency)
            spec = msgspec.structs.replace(spec, engines=engines)
        if batch_run.options.limit is not None:
            spec = msgspec.structs.replace(spec, limit=batch_run.options.limit)
        if batch_run.api_key is not None and spec.engines.url != batch_run.url:
            journal = JobSpec(inputs=(), output=batch_run.output).journal
            _check_key_recipient(spec.engines.url, journal, batch_run.api_key)
        manifest.check_resumable(spec)
    return spec


def _check_key_recipient(url: str | None, journal: StoragePath, key: str) -> None:
    """A key is sent to the URL in a journal only if this user wrote the journal. Raises: ConfigError."""
    if url is None or (journal.is_local and os.stat(journal.url).st_uid == os.geteuid()):
        return
    names = [f"unset {name}" for name in API_KEY_NAMES if os.environ.get(name) == key]
    raise ConfigError(
        f"The API key would be sent to {url}, which the journal '{journal.url}' names, and others may have "
        f"written that. If it is right, add --url {url}; else {' and '.join(names) or 'drop --api-key'}."
    )


async def _signalled(job: Job, signals_fd: int, meter: Meter) -> JobReport:
    """Runs the job; each byte of `signals_fd` is a signal, its end that of the guard."""
    last = -_ONE_SIGNAL_S

    def receive() -> None:
        nonlocal last
        heard = os.read(signals_fd, 1)
        if not heard:  # the guard was killed: the same command must find the output free
            asyncio.get_running_loop().remove_reader(signals_fd)
            job.stop.request(signal.SIGKILL.name)
            job.stop.force()
        elif time.monotonic() - last > _ONE_SIGNAL_S:
            last = time.monotonic()
            again = job.stop.requested
            job.stop.request(signal.Signals(heard[0]).name)
            if not again:
                meter.on_message("Stopping; rows that run have 30 s to end. Ctrl-C again ends them.")

    asyncio.get_running_loop().add_reader(signals_fd, receive)
    return await job.run()


def _code(done: JobReport, *, fail_on_errors: bool) -> int:
    if done.ended == manifest.FINISHED:
        return _FAILED if done.failed and (fail_on_errors or not done.ok) else 0
    if done.ended.startswith(BUDGET):
        return _STOPPED
    return 128 + signal.Signals[done.ended].value if done.ended in signal.Signals.__members__ else _FAILED


def _explain(error: Exception, output: Output) -> int:
    output.note("".join(traceback.format_exception(error)))
    print(f"penstock batch: {sentence(error)}", file=output.err)
    bad = isinstance(error, ConfigError | SourceNotFound)
    if output.log is not None and not bad:
        print(f"Full log: {output.log}.", file=output.err)
    return _BAD_CONFIG if bad else _FAILED


def sentence(error: Exception) -> str:
    """What users read of any error."""
    if isinstance(error, EngineStartFailed):
        return reason(str(error))
    if isinstance(error, Error):
        return str(error)
    if isinstance(error, OSError):
        return f"{_os_error(error)}. Finished rows are kept: run the same command to continue."
    return (
        f"a fault of Penstock's own: {type(error).__name__}: {error}. Finished rows are kept: run the same "
        "command to continue, unless it meets the same fault."
    )


def _os_error(error: OSError) -> str:
    why = error.strerror or str(error) or type(error).__name__
    return f"'{error.filename}': {why}" if error.filename else why


def plan_of(engines: EngineSpec) -> ServePlan | None:
    """The engines that the job starts; None without any, and where the journal has their config.

    Raises: ConfigError.
    """
    if engines.url is not None or engines.app is not None or engines.config is not None:
        return None
    words = engines.cli_args
    if words[1:] and not words[1].startswith("-"):
        raise ConfigError(
            "This job was begun from Python with a config that a journal cannot hold. Call batch() again as "
            "before, or name the model with --model."
        )
    arguments = Arguments(
        sources=words[:1],
        engine_words=words[1:],
        engine=cast("Engine | None", engines.engine),
        accelerator=engines.accelerator,
        replicas=engines.replicas or None,
    )
    if kind := engines.accelerator:
        os.environ["PENSTOCK_ACCELERATOR"] = kind if kind in ACCELERATOR_KINDS else "gpu"
    planned = make_plan(arguments)
    if len(planned.configs) != 1:
        raise ConfigError(f"'{words[0]}' describes {len(planned.configs)} models; a job has one.")
    return planned


def config_of(engines: EngineSpec, plan: ServePlan | None = None) -> LLMConfig | None:
    """The config of engines that the job starts, with their arguments read. plan: if it was made already.

    Raises: ConfigError.
    """
    plan = plan or plan_of(engines)
    if plan is not None:
        return read_engine_words(plan).configs[0]
    return None if engines.config is None else LLMConfig.model_validate(engines.config)


def _without_chat(spec: JobSpec, config: LLMConfig) -> JobSpec:
    """The spec, its rows' prompts as they are where the model has no chat template."""
    chats = spec.prompts_as_messages and not lacks_chat_template(config)
    return msgspec.structs.replace(spec, prompts_as_messages=chats)


def dry_run(spec: JobSpec) -> int:
    """Exit code: 0 when every row can become a request."""
    config = config_of(spec.engines)
    found = preview(spec if config is None else _without_chat(spec, config), config)
    if found.note:
        print(found.note)
    for number, prompt in found.prompts:
        print(f"\nRow {number}:\n{prompt}")
    same = f" {found.same:,} of them repeat another one and get its answer." if found.same else ""
    print(f"\n{found.good:,} of {found.rows:,} rows can become requests.{same}")
    for number, fault in found.faults:
        print(f"Row {number}: {fault}", file=sys.stderr)
    if found.skipped:
        print(f"{found.skipped:,} rows are skipped: the columns of the prompt are empty.")
    if (more := found.rows - found.good - found.skipped - len(found.faults)) > 0:
        print(f"And {more:,} more rows that cannot.", file=sys.stderr)
    return _FAILED if found.faults else 0


def status(output: str, *, as_json: bool) -> int:
    """Prints how far the job of an output is. Raises: ConfigError when there is none."""
    journal = Job.load_spec(output).journal
    found = manifest.read(journal)
    assert found is not None
    ended = found.stop_reason or ("running" if is_locked(journal) else "interrupted")
    spool = temporary_folder("batch")
    try:
        index = Index(journal, spool)
        now = report(output, ended, index, RunStats(total=found.total), [], None)
        index.close()
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    last = found.report
    if last is not None:
        now = msgspec.structs.replace(now, files=last.files, cost=last.cost)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(now)).decode())
    else:
        print("\n".join(shown(now, whole=False)))
    return 0
