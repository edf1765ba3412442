"""The options of `penstock batch`. The work is in `run` and in `penstock.data`, imported when needed."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from typer.core import TyperGroup

from penstock.cli.batch.options import EnginesToUse, NewEngines, RowOptions, RunOptions
from penstock.cli.models.options import CommandOptions, Json, split
from penstock.errors import BadRequest, ConfigError, Error
from penstock.options import by_fields

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
            word = args[0] if args else ""
            meant = difflib.get_close_matches(word, self.commands, 1)
            if meant and word.isidentifier() and not Path(word).exists():
                ctx.fail(f"There is no file {word!r}, and no such command. Did you mean {meant[0]!r}?")
            args = ["run", *(args or ["--help"])]
        return super().parse_args(ctx, args)


batch = typer.Typer(
    cls=_InputFirst,
    help="Run every row of a file through a model, without losing any.",
    rich_markup_mode="markdown",
)


_Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders, globs.")]
_NewOutput = Annotated[
    str, typer.Option("--output", "-o", help="A file, or a folder of part files when it ends with /.")
]
_Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the job.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check all rows and show the first prompts; send nothing.")
]


@contextmanager
def _in_words() -> Generator[None]:
    """What is not an error of ours ends the command with a sentence, too."""
    from penstock.cli.batch.run import sentence

    try:
        yield
    except Error:
        raise
    except Exception as error:
        print(f"penstock batch: {sentence(error)}", file=sys.stderr)
        sys.exit(1)


@batch.command(name="run", hidden=True, help=_HELP, context_settings={"ignore_unknown_options": True})
@by_fields
def run(
    context: typer.Context,
    words: _Inputs,
    output: _NewOutput,
    engines: NewEngines,
    rows: RowOptions,
    options: RunOptions,
    dry_run: _DryRun = False,
) -> int:
    from penstock.data.job.spec import JobSpec

    inputs, engine_words = split(words)
    with _in_words():
        if engines.submit is not None:
            return _submit(context, inputs, engine_words)
        without_prompt = "without --prompt" if rows.prompt is None else None
        _refuse_idle("without --submit", {"--window": rows.window})
        _refuse_idle(without_prompt, {"--system": rows.system})
        _refuse_idle("with --reuse off" if rows.reuse == "off" else None, {"--reuse-from": rows.reuse_from})
        spec = JobSpec(
            inputs=tuple(map(_absolute_url, inputs)),
            output=_absolute_url(output),
            engines=_engines(engine_words, engines, _command(context)),
            input_form=rows.input_form,
            answer_column=rows.answer_column,
            kind=rows.task,
            template=rows.prompt,
            system=rows.system,
            chat=not rows.no_chat,
            prompts_as_messages=not rows.no_chat and rows.prompt is None and rows.task == "generate",
            defaults=_defaults(rows.param or [], rows.max_tokens),
            group_prefixes=not rows.no_group_prefixes,
            reuse=rows.reuse,
            reuse_from=None if rows.reuse_from is None else _absolute_url(rows.reuse_from),
            read_files=not rows.no_read_files,
            max_attempts=rows.attempts,
            deadline_s=rows.deadline,
            limit=options.limit,
        )
        if dry_run:
            from penstock.cli.batch.run import dry_run as check_rows

            return check_rows(spec)
    return _start(context, output, engines, options, spec=spec)


@batch.command(context_settings={"ignore_unknown_options": True})
@by_fields
def resume(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="OUTPUT", help="The output of the job.")],
    engines: EnginesToUse,
    options: RunOptions,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")] = False,
) -> int:
    """Continue a job that was stopped or killed; with other engines, where options name some."""
    from penstock.data.job.job import Job

    outputs, engine_words = split(words)
    with _in_words():
        if len(outputs) != 1:
            raise ConfigError(f"Give one output, not {len(outputs)}.")
        chosen, given = None, engines
        output = _absolute_url(outputs[0])
        began = Job.load_spec(output).engines
        named = given.url or given.app or engine_words
        if given.model and (began.url or began.app) and not (named or given.replicas):
            chosen = replace(began, model=given.model)
        elif given.model or named:
            chosen = _engines(engine_words, given, _command(context))
        elif given.replicas or given.deployment:
            idle = None if began.cli_args else "on a job that starts no engines"
            _refuse_idle(idle, {"--replicas": given.replicas})
            _refuse_idle(None if began.app else "on a job without --app", {"--deployment": given.deployment})
            replicas, deployment = given.replicas or began.replicas, given.deployment or began.deployment
            chosen = replace(began, replicas=replicas, deployment=deployment)
    return _start(context, output, engines, options, engines=chosen, retry_failed=retry_failed)


@batch.command()
def status(output: _Output, as_json: Json = False) -> int:
    """Show the progress of a job: rows by state, tokens, errors by kind."""
    from penstock.cli.batch.run import status as show_status

    with _in_words():
        return show_status(_absolute_url(output), as_json=as_json)


_SUBMIT = frozenset({"words", "output", "submit", "window", "api_key", "fail_on_errors"})
"""Options that --submit goes with."""


def _submit(context: typer.Context, inputs: tuple[str, ...], engine_words: tuple[str, ...]) -> int:
    """Sends the input to a service's Batches API."""
    from penstock.cli.batch.submit import submit

    given = context.params
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name not in _SUBMIT and source is not None and source.name == "COMMANDLINE":
            _refuse_idle("with --submit", {param.opts[0]: True})
    _refuse_idle("with --submit", dict.fromkeys(engine_words[:1], True))
    names = ("output", "submit", "api_key", "window")
    return submit(inputs, *(given[name] for name in names), fail_on_errors=given["fail_on_errors"])


def _start(context: typer.Context, output: str, given: EnginesToUse, options: RunOptions, **job: Any) -> int:
    """Runs a job. Gives its exit code."""
    from penstock.cli.batch.run import STOP_S, BatchRun
    from penstock.cli.batch.run import run as run_job
    from penstock.cli.process import guard

    batch_run = BatchRun(
        _absolute_url(output), _command(context), options, url=given.url, api_key=given.api_key, **job
    )
    code = guard.guarded(partial(run_job, batch_run), stop_s=STOP_S)
    if code - 128 in set(signal.Signals) - set(guard.STOPS):
        name = signal.Signals(code - 128).name
        print(
            f"penstock batch: its process was killed by {name}, perhaps for lack of memory. Finished rows "
            f"are in '{output.rstrip('/')}.journal': run the same command to continue.",
            file=sys.stderr,
        )
    return code


def _command(context: typer.Context) -> CommandOptions:
    words = [word for param in context.command.params for word in param.opts if word.startswith("--")]
    return CommandOptions("penstock batch", tuple(words))


def _refuse_idle(where: str | None, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError for an option that is given and would do nothing. where: None where all do."""
    for name, value in options.items():
        if where is not None and value is not None:
            raise ConfigError(f"{name} has no effect {where}; leave it out.")


def _engines(words: tuple[str, ...], given: EnginesToUse, command: CommandOptions) -> Any:
    """The engines, service or application that is named. Raises: ConfigError."""
    from penstock.cli.models.engine_arguments import with_own_options
    from penstock.data.job.spec import EngineSpec

    if given.url is not None and given.app is not None:
        raise ConfigError("Give --url or --app, not both.")
    engine_options = {f"--{name}": getattr(given, name) for name in ("replicas", "engine", "accelerator")}
    more = {"--concurrency": given.concurrency}
    if given.url is not None:
        _refuse_idle("with --url", {**engine_options, "--deployment": given.deployment})
    elif given.app is not None:
        _refuse_idle("with --app", {**engine_options, **more})
    else:
        _refuse_idle("without --app", {"--deployment": given.deployment})
        _refuse_idle("without --url", more)
    spec = EngineSpec(
        url=given.url,
        app=given.app,
        deployment=given.deployment,
        model=given.model,
        replicas=given.replicas or 0,
        engine=given.engine,
        accelerator=given.accelerator,
        address=None if given.address in ("", "local") else given.address,
        concurrency=given.concurrency or 64,
    )
    text = None
    if given.url is not None or given.app is not None:
        if not words:
            return spec
        text = f"{words[0]} is not an option of `penstock batch` with --url or --app."
    elif given.model is None and given.engine != "sim":
        text = "Name the engines: --model MODEL, --url URL or --app NAME (--model demo to try)."
    if text is not None:
        raise with_own_options(ConfigError(text), words, command)
    model = given.model or ""
    if model and Path(model).exists():  # from any working directory; hub ids stay
        model = str(Path(model).absolute())
    return replace(spec, cli_args=(model, *words), model=None)


def _defaults(params: list[str], max_tokens: int | None) -> dict[str, Any]:
    """Raises: ConfigError."""
    from penstock.config.loading import yaml_source
    from penstock.data.rows.coerce import to_json

    found: dict[str, Any] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {param!r} must be NAME=VALUE, as in temperature=0.")
        try:
            found[name] = to_json(yaml_source.parse(value, f"--param {name}")[0], f"--param {name}")
        except ConfigError as error:
            raise ConfigError(f"{error} Quote a text: 'stop=\"[1\"'.") from error
        except BadRequest as error:
            raise ConfigError(str(error)) from error
    if max_tokens is not None and found.setdefault("max_tokens", max_tokens) != max_tokens:
        raise ConfigError("--max-tokens and --param max_tokens differ; give one of them.")
    return found


def _absolute_url(path: str) -> str:
    """The same from any working directory: the job may be resumed in another one."""
    from penstock.data.storage.paths import absolute

    return absolute(path)
