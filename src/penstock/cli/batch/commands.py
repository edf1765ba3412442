"""The options of `penstock batch`. The work is in `run` and in `penstock.data`, imported when needed."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from penstock.cli.batch import options
from penstock.cli.models.options import CommandOptions, split
from penstock.cli.process.failure import fail
from penstock.errors import BadRequest, ConfigError, Error

_HELP = """
Run every row of a file through a model, without losing any.

INPUT is JSON, Parquet, CSV or TSV, or a file of OpenAI's batch form; a file, a folder or a glob, here or in
a bucket. Rows hold the fields of a request (`messages`, `prompt`, `max_tokens`, ...), or any columns of which
--prompt makes one. Options that are not listed go to the engine under the names of `vllm serve`.

- `penstock batch questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct`
- `penstock batch articles.parquet -o out/ --model ./my-model --prompt "Summarise: {text}" --max-tokens 200`
- `penstock batch requests.jsonl -o answers.jsonl --url http://gpu-box:8000`
- `penstock batch requests.jsonl -o answers.jsonl --submit http://gpu-box:8000`, which the service runs
- `penstock batch 's3://bucket/in/*.jsonl' -o s3://bucket/out.jsonl --model qwen.yaml --replicas 4`

A job that was killed or stopped continues with the same command, or with

- `penstock batch resume answers.jsonl`, with `--retry-failed` to run failed rows again
- `penstock batch status answers.jsonl`
"""


class _InputFirst(TyperGroup):
    """`penstock batch INPUT ...` is `penstock batch run INPUT ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            self._refuse_misspelt(ctx, *args[:1])
            args = ["run", *(args or ["--help"])]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: Any, word: str = "") -> None:
        meant = difflib.get_close_matches(word, self.commands, 1)
        if meant and word.isidentifier() and not Path(word).exists():
            ctx.fail(f"There is no file {word!r}, and no such command. Did you mean {meant[0]!r}?")


batch = typer.Typer(
    cls=_InputFirst,
    help="Run every row of a file through a model, without losing any.",
    rich_markup_mode="markdown",
)


@batch.command(name="run", hidden=True, help=_HELP, context_settings={"ignore_unknown_options": True})
def run(
    context: typer.Context,
    words: options.Inputs,
    output: options.NewOutput,
    model: options.Model = None,
    url: options.Url = None,
    app: options.App = None,
    deployment: options.Deployment = None,
    submit: options.Submit = None,
    window: options.Window = None,
    api_key: options.Key = None,
    replicas: options.Replicas = None,
    engine: options.Engine = None,
    accelerator: options.Accelerator = None,
    address: options.Address = None,
    concurrency: options.Concurrency = None,
    task: options.Task = "generate",
    prompt: options.Prompt = None,
    system: options.System = None,
    no_chat: options.NoChat = False,
    max_tokens: options.MaxTokens = None,
    param: options.Param = None,
    input_form: options.InputForm = None,
    answer_column: options.AnswerColumn = None,
    limit: options.Limit = None,
    reuse: options.Reuse = "exact",
    reuse_from: options.ReuseFrom = None,
    no_group_prefixes: options.NoGroupPrefixes = False,
    no_read_files: options.NoReadFiles = False,
    attempts: options.Attempts = 3,
    deadline: options.Deadline = None,
    max_seconds: options.MaxSeconds = None,
    max_total_tokens: options.MaxTotalTokens = None,
    max_failures: options.MaxFailures = None,
    dry_run: options.DryRun = False,
    report: options.Report = None,
    price_input: options.PriceIn = None,
    price_output: options.PriceOut = None,
    fail_on_errors: options.FailOnErrors = False,
    verbose: options.Verbose = False,
) -> None:
    from penstock.data.job.spec import EngineSpec, JobSpec

    inputs, engine_words = split(words)
    if submit is not None:
        _submit(context, inputs, engine_words)
    try:
        _refuse_idle("without --submit", {"--window": window})
        _refuse_idle("without --prompt" if prompt is None else None, {"--system": system})
        _refuse_idle("with --reuse off" if reuse == "off" else None, {"--reuse-from": reuse_from})
        spec = JobSpec(
            inputs=inputs,
            output=output,
            engines=_engines(
                engine_words,
                EngineSpec(
                    url=url,
                    app=app,
                    deployment=deployment,
                    model=model,
                    replicas=replicas or 0,
                    engine=engine,
                    accelerator=accelerator,
                    address=address,
                    concurrency=concurrency or 64,
                ),
                {"--concurrency": concurrency},
                _command(context),
            ),
            input_form=input_form,
            answer_column=answer_column,
            kind=task,
            template=prompt,
            system=system,
            chat=not no_chat,
            prompts_as_messages=not no_chat and prompt is None and task == "generate",
            defaults=_defaults(param or [], max_tokens),
            group_prefixes=not no_group_prefixes,
            reuse=reuse,
            reuse_from=reuse_from,
            read_files=not no_read_files,
            max_attempts=attempts,
            deadline_s=deadline,
            limit=limit,
        )
        spec = _absolute(spec)
        if dry_run:
            from penstock.cli.batch.run import dry_run as check_rows

            sys.exit(check_rows(spec))
    except Exception as error:
        _fail(error)
    _start(context, output, spec=spec)


@batch.command(context_settings={"ignore_unknown_options": True})
def resume(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="OUTPUT", help="The output of the job.")],
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")] = False,
    model: options.Model = None,
    url: options.Url = None,
    app: options.App = None,
    deployment: options.Deployment = None,
    api_key: options.Key = None,
    replicas: options.Replicas = None,
    address: options.Address = None,
    limit: options.Limit = None,
    max_seconds: options.MaxSeconds = None,
    max_total_tokens: options.MaxTotalTokens = None,
    max_failures: options.MaxFailures = None,
    report: options.Report = None,
    price_input: options.PriceIn = None,
    price_output: options.PriceOut = None,
    fail_on_errors: options.FailOnErrors = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue a job that was stopped or killed; with other engines, where options name some."""
    from msgspec.structs import replace

    from penstock.data.job.job import Job
    from penstock.data.job.spec import EngineSpec

    outputs, engine_words = split(words)
    try:
        if len(outputs) != 1:
            raise ConfigError(f"Give one output, not {len(outputs)}.")
        engines = None
        output = _absolute_url(outputs[0])
        began = Job.load_spec(output).engines
        if model and (began.url or began.app) and not (url or app or replicas or engine_words):
            engines = replace(began, model=model)
        elif model or url or app or engine_words:
            given = EngineSpec(
                url=url, app=app, deployment=deployment, model=model, replicas=replicas or 0, address=address
            )
            engines = _engines(engine_words, given, {}, _command(context))
        elif replicas or deployment:
            engines = _changed(began, replicas, deployment)
    except Exception as error:
        _fail(error)
    _start(context, output, engines=engines, url=url, limit=limit, retry_failed=retry_failed)


@batch.command()
def status(
    output: options.Output,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the progress of a job: rows by state, tokens, errors by kind."""
    from penstock.cli.batch.run import status as show_status

    try:
        code = show_status(_absolute_url(output), as_json=json)
    except Exception as error:
        _fail(error)
    sys.exit(code)


_SUBMIT = frozenset({"words", "output", "submit", "window", "api_key", "fail_on_errors"})
"""Options that --submit goes with."""


def _submit(context: typer.Context, inputs: tuple[str, ...], engine_words: tuple[str, ...]) -> NoReturn:
    """Sends the input to a service's Batches API, and exits."""
    from penstock.cli.batch.submit import submit

    given = context.params
    try:
        for param in context.command.params:
            source = context.get_parameter_source(param.name or "")
            if param.name not in _SUBMIT and source is not None and source.name == "COMMANDLINE":
                _refuse_idle("with --submit", {param.opts[0]: True})
        _refuse_idle("with --submit", dict.fromkeys(engine_words[:1], True))
        code = submit(
            inputs,
            given["output"],
            given["submit"],
            given["api_key"],
            given["window"],
            fail_on_errors=given["fail_on_errors"],
        )
    except Exception as error:
        _fail(error)
    sys.exit(code)


def _start(context: typer.Context, output: str, **job: Any) -> None:
    """Runs a job with the limits, prices and other options that `run` and `resume` share, and exits."""
    from penstock.cli.batch.run import STOP_S, BatchRun
    from penstock.cli.batch.run import run as run_job
    from penstock.cli.process import guard
    from penstock.data.job.report import Limits, Prices

    given = context.params
    prices = given["price_input"], given["price_output"]
    batch_run = BatchRun(
        _absolute_url(output),
        _command(context),
        limits=Limits(given["max_seconds"], given["max_total_tokens"], given["max_failures"]),
        prices=Prices(prices[0] or 0.0, prices[1] or 0.0) if prices != (None, None) else None,
        **{name: given[name] for name in ("report", "api_key", "fail_on_errors", "verbose")},
        **job,
    )
    code = guard.guarded(partial(run_job, batch_run), stop_s=STOP_S)
    if code - 128 in set(signal.Signals) - set(guard.STOPS):
        name = signal.Signals(code - 128).name
        print(
            f"penstock batch: its process was killed by {name}, perhaps for lack of memory. Finished rows "
            f"are in '{output.rstrip('/')}.journal': run the same command to continue.",
            file=sys.stderr,
        )
    sys.exit(code)


def _command(context: typer.Context) -> CommandOptions:
    words = [word for param in context.command.params for word in param.opts if word.startswith("--")]
    return CommandOptions("penstock batch", tuple(words))


def _fail(error: Exception) -> NoReturn:
    from penstock.cli.batch.run import sentence

    if isinstance(error, Error):
        fail("batch", error)
    print(f"penstock batch: {sentence(error)}", file=sys.stderr)
    sys.exit(1)


def _refuse_idle(where: str | None, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError for an option that is given and would do nothing. where: None where all do."""
    for name, value in options.items():
        if where is not None and value is not None:
            raise ConfigError(f"{name} has no effect {where}; leave it out.")


def _changed(began: Any, replicas: int | None, deployment: str | None) -> Any:
    """The engines of a job that was begun, but for what is asked now. Raises: ConfigError."""
    from msgspec.structs import replace

    _refuse_idle(None if began.cli_args else "on a job that starts no engines", {"--replicas": replicas})
    _refuse_idle(None if began.app else "on a job without --app", {"--deployment": deployment})
    return replace(began, replicas=replicas or began.replicas, deployment=deployment or began.deployment)


def _engines(words: tuple[str, ...], given: Any, more: Mapping[str, Any], command: CommandOptions) -> Any:
    """`given`, checked: it names one of engines, service and application. more: options that are not in it.

    Raises: ConfigError.
    """
    from msgspec.structs import replace

    from penstock.cli.models.engine_arguments import with_own_options

    address = None if given.address in ("", "local") else given.address
    if given.url is not None and given.app is not None:
        raise ConfigError("Give --url or --app, not both.")
    engine_options = {
        "--replicas": given.replicas or None,
        "--engine": given.engine,
        "--accelerator": given.accelerator,
    }
    if given.url is not None:
        _refuse_idle("with --url", {**engine_options, "--deployment": given.deployment})
    elif given.app is not None:
        _refuse_idle("with --app", {**engine_options, **more})
    else:
        _refuse_idle("without --app", {"--deployment": given.deployment})
        _refuse_idle("without --url", more)
    if given.url is not None or given.app is not None:
        if words:
            text = f"{words[0]} is not an option of `penstock batch` with --url or --app."
            raise with_own_options(ConfigError(text), words, command)
        return replace(given, address=address)
    if given.model is None and given.engine != "sim":
        text = "Name the engines: --model MODEL, --url URL or --app NAME (--model demo to try)."
        raise with_own_options(ConfigError(text), words, command)
    cli_args = (_absolute_path(given.model or ""), *words)
    return replace(given, cli_args=cli_args, model=None, address=address)


def _defaults(params: list[str], max_tokens: int | None) -> dict[str, Any]:
    """Raises: ConfigError."""
    import yaml

    from penstock.data.rows.coerce import to_json

    found: dict[str, Any] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {param!r} must be NAME=VALUE, as in temperature=0.")
        try:
            found[name] = to_json(yaml.safe_load(value), f"--param {name}")
        except yaml.YAMLError as error:
            raise ConfigError(f"--param {param!r} is not YAML; quote it, as in 'stop=\"[1\"'.") from error
        except BadRequest as error:
            raise ConfigError(str(error)) from error
    if max_tokens is not None and found.setdefault("max_tokens", max_tokens) != max_tokens:
        raise ConfigError("--max-tokens and --param max_tokens differ; give one of them.")
    return found


def _absolute(spec: Any) -> Any:
    """The same from any working directory: the job may be resumed in another one."""
    from msgspec.structs import replace

    inputs = tuple(_absolute_url(one) for one in spec.inputs)
    reuse_from = None if spec.reuse_from is None else _absolute_url(spec.reuse_from)
    return replace(spec, inputs=inputs, output=_absolute_url(spec.output), reuse_from=reuse_from)


def _absolute_url(path: str) -> str:
    from penstock.data.storage.paths import absolute

    return absolute(path)


def _absolute_path(model: str) -> str:
    """A model's folder or a config's file from any working directory; hub ids stay."""
    return str(Path(model).absolute()) if model and Path(model).exists() else model
