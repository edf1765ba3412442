"""`penstock.data.batch`: a whole job by one call from Python, as by the command `penstock batch`."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from penstock.config import LLMConfig
from penstock.data.job.job import Job
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.report import JobReport, Limits, Prices, ProgressListener
from penstock.data.job.spec import EngineSpec, JobSpec, Reuse
from penstock.data.job.validation import check_continuation, continued, finished_report
from penstock.data.job.worker import InProcessPool
from penstock.data.rows.coerce import to_json
from penstock.data.rows.request import Kind
from penstock.data.storage.paths import absolute
from penstock.errors import BadRequest, ConfigError
from penstock.preflight import start

_TIMEOUT_S = 3600.0
"""For one request to a URL, so that a service that never answers cannot block the last row for ever."""


def batch(
    inputs: str | Sequence[str],
    output: str,
    *,
    config: LLMConfig | Mapping[str, Any] | None = None,
    replicas: int = 0,
    url: str | None = None,
    app: str | None = None,
    deployment: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 64,
    address: str | None = None,
    task: Kind = "generate",
    prompt: str | None = None,
    system: str | None = None,
    chat: bool = True,
    params: dict[str, Any] | None = None,
    input_form: str | None = None,
    answer_column: str | None = None,
    limit: int | None = None,
    reuse: Reuse = "exact",
    reuse_from: str | None = None,
    read_files: bool = True,
    attempts: int = 3,
    deadline_s: float | None = None,
    limits: Limits | None = None,
    prices: Prices | None = None,
    watcher: ProgressListener | None = None,
    retry_failed: bool = False,
) -> JobReport:
    """Runs every row of `inputs` through engines of `config`, or a service, and writes `output`.

    Called again after it was stopped or killed, it resumes the job; for a finished output it returns the
    report, unless `retry_failed`. Ctrl-C stops it cleanly, and completed rows stay in the journal; `penstock
    batch resume OUTPUT` also resumes the job. The arguments are the options of `penstock batch`. It works in
    notebooks.
    Raises: ConfigError, SourceNotFound, OutputLocked, Unavailable, EngineStartFailed.
    """
    patterns = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    engines = EngineSpec(
        url=url,
        app=app,
        deployment=deployment,
        model=model,
        replicas=replicas,
        concurrency=concurrency,
        address=address,
    )
    chats = chat and prompt is None and task == "generate"
    config = None if config is None else LLMConfig.from_argument(config, "config")
    if config is not None:
        from penstock.data.backends.engine_config import engine_identity, lacks_chat_template

        chats = chats and not lacks_chat_template(config)
        engines = msgspec.structs.replace(
            engines,
            cli_args=(config.model_id, config.model_source),
            config=_config_as_json(config),
            answers=engine_identity(config),
        )
    spec = JobSpec(
        inputs=tuple(map(absolute, patterns)),
        output=absolute(output),
        engines=engines,
        input_form=input_form,
        answer_column=answer_column,
        kind=task,
        template=prompt,
        system=system,
        chat=chat,
        prompts_as_messages=chats,
        defaults=_params_as_json(params or {}),
        limit=limit,
        reuse=reuse,
        reuse_from=None if reuse_from is None else absolute(reuse_from),
        read_files=read_files,
        max_attempts=attempts,
        deadline_s=deadline_s,
    )
    if (done := finished_report(continued(spec), spec, retry_failed=retry_failed)) is not None:
        return done
    ray = sys.modules.get("ray")
    if (
        config is not None and address is None and not (ray and ray.is_initialized())
    ):  # else on other machines
        start.refuse(config)
    job = Job(
        spec,
        make_worker_pool(
            engines, config, kind=task, api_key=api_key, on_message=watcher and watcher.on_message
        ),
        limits=limits,
        prices=prices,
        listener=watcher,
        retry_failed=retry_failed,
        check=lambda before: check_continuation(before, spec),
    )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_run_with_signals(job))
    return _run_in_thread(job)


def _params_as_json(params: dict[str, Any]) -> dict[str, Any]:
    """As JSON values, as the journal returns them. Raises: ConfigError for what JSON cannot hold."""
    try:
        return {name: to_json(value, name) for name, value in params.items()}
    except BadRequest as error:
        raise ConfigError(f"params: {error}") from error


def _config_as_json(config: LLMConfig) -> dict[str, Any] | None:
    """A config as JSON, without secrets; None if JSON cannot hold it: then only Python can resume."""
    from penstock.config.derive.serve_options import without_secrets

    environment, _ = without_secrets(config.runtime_env or {})
    public = config.model_copy(update={"runtime_env": environment}) if config.runtime_env else config
    try:
        found = public.model_dump(mode="json", exclude_unset=True, warnings=False)
        return found if type(config).model_validate(found) == public else None
    except (TypeError, ValueError):
        return None


def make_worker_pool(
    engines: EngineSpec,
    config: LLMConfig | None,
    *,
    kind: Kind = "generate",
    api_key: str | None = None,
    verbose: bool = False,
    on_message: Callable[[str], None] | None = None,
) -> WorkerPool:
    """The pool for `engines`: engines to start, by `config`; a URL; or a running application.

    on_message: called with what users should know while Ray starts.

    Raises: ConfigError.
    """
    if engines.url is not None:
        from penstock.data.backends.openai_service import OpenAIService

        return InProcessPool(
            partial(
                OpenAIService,
                engines.url,
                api_key=api_key,
                model=engines.model,
                max_concurrency=engines.concurrency,
                timeout_s=_TIMEOUT_S,
            )
        )
    if engines.app is not None:
        from penstock.data.backends.ray_cluster import connect
        from penstock.data.backends.replica_set import ReplicaSet

        return InProcessPool(
            partial(ReplicaSet, engines.app, engines.deployment),
            partial(connect, engines.address or "auto", cpus=0, verbose=verbose),
        )
    if config is None:
        raise ConfigError("Name what answers: a model or a config, a URL, or an application.")
    from penstock.config.derive.serve_options import most_replicas
    from penstock.data.backends.engine_config import with_runner
    from penstock.data.job.ray_workers import RayActorPool

    size = engines.replicas or most_replicas(config.deployment_config)
    return RayActorPool(
        with_runner(config, kind), size, address=engines.address, verbose=verbose, on_message=on_message
    )


def _run_in_thread(job: Job) -> JobReport:
    """For notebooks, where this thread's loop runs already: in another thread, with another loop."""
    loop = asyncio.new_event_loop()

    def work() -> JobReport:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_run_with_signals(job))

    with ThreadPoolExecutor(1, "batch") as thread:
        done = thread.submit(work)
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:  # Ctrl-C, or the notebook's stop button
                loop.call_soon_threadsafe(job.stop.request, signal.SIGINT.name)


async def _run_with_signals(job: Job) -> JobReport:
    loop, before = asyncio.get_running_loop(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):
                before[signum] = signal.getsignal(signum)
                loop.add_signal_handler(signum, job.stop.request, signal.Signals(signum).name)
    try:
        return await job.run()
    finally:
        for signum, handler in before.items():  # the program's own
            loop.remove_signal_handler(signum)
            signal.signal(signum, handler or signal.SIG_DFL)
