"""The options of `penstock batch`: `run` has all, `resume` those of `EnginesToUse` and `RunOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from penstock.cli.models.options import API_KEY_NAMES
from penstock.cli.models.options import Engine as EngineName
from penstock.options import option

_engine = partial(option, rich_help_panel="Engines")
_row = partial(option, rich_help_panel="Rows")
_limit = partial(option, rich_help_panel="Limits")
_report = partial(option, rich_help_panel="Report")


@dataclass(frozen=True, slots=True)
class EnginesToUse:
    """What answers. The last three are options of a new job alone."""

    model: str | None = _engine(
        "Model to load (hub id, folder or CONFIG.yaml); with --url or --app, the name of the model."
    )
    url: str | None = _engine("OpenAI-compatible service to send requests to.")
    app: str | None = _engine("Application on a Ray cluster to send requests to.")
    deployment: str | None = _engine("With --app: deployment to use, when it serves several models.")
    api_key: str | None = _engine("Key of the service.", envvar=API_KEY_NAMES)
    replicas: int | None = _engine("Number of engines to start.", min=1)
    address: str | None = _engine("Ray cluster to use (host:port, or auto).", envvar="RAY_ADDRESS")
    engine: EngineName | None = None
    accelerator: str | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class NewEngines(EnginesToUse):
    """The same at the start of a job."""

    submit: str | None = _engine("Service whose Batches API runs INPUT, a file of OpenAI's batch lines.")
    engine: EngineName | None = _engine("`sim` is a simulator.", case_sensitive=False, show_default="vllm")
    accelerator: str | None = _engine("`cpu`, `gpu`, or Ray's name of a GPU type.")
    concurrency: int | None = _engine(
        "Maximum number of concurrent requests to --url.", min=1, show_default="64"
    )


@dataclass(frozen=True, slots=True)
class RowOptions:
    """From a row to a request."""

    task: Literal["generate", "embed", "classify", "score"] = _row(
        "What the model does with a row.", "generate"
    )
    prompt: str | None = _row("Prompt template with columns in braces: `Summarise: {text}`.")
    system: str | None = _row("With --prompt: a system prompt.")
    no_chat: bool = _row("Send prompts as they are, not as chat messages.", False)
    max_tokens: int | None = _row("Most tokens of an answer.", min=1)
    param: list[str] | None = _row("NAME=VALUE to add to every request: `temperature=0`.")
    input_form: Literal["jsonl", "parquet", "csv", "tsv"] | None = _row(
        "Format of INPUT.", show_default="by its name"
    )
    answer_column: str | None = _row(
        "Write every row, also failed ones, with its answer in NAME, and `error`; no more.", metavar="NAME"
    )
    reuse: Literal["exact", "all", "off"] = _row(
        "Send identical requests once: `exact` only where the answer would be the same "
        "(temperature 0, a seed, embeddings).",
        "exact",
    )
    reuse_from: str | None = _row("Reuse answers of another job's output, too.")
    no_group_prefixes: bool = _row("Do not group rows with the same prefix.", False)
    no_read_files: bool = _row(
        "Refuse rows that name files or buckets. For rows from untrusted sources.", False
    )
    attempts: int = _limit("How often a row is tried before a temporary error fails it.", 3, min=1)
    deadline: float | None = _limit("Seconds for all attempts of a row.", min=0.001)
    window: str | None = _limit(
        "With --submit: time for the whole batch, as 90m, 24h or 7d.", show_default="24h"
    )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Of one run of a job: its limits, and what it reports."""

    limit: int | None = _row("Process only the first N rows.", min=1)
    max_seconds: float | None = _limit("Stop after this many seconds.", min=0.0)
    max_total_tokens: int | None = _limit("Stop after this many tokens of prompts and answers.", min=1)
    max_failures: int | None = _limit("Stop when this many rows have failed.", min=1)
    report: str | None = _report("Write the report as JSON to this file.")
    price_input: float | None = _report("Price of a million prompt tokens.", min=0)
    price_output: float | None = _report("Price of a million generated tokens.", min=0)
    fail_on_errors: bool = _report("Exit with 1 when any row failed, not only when all did.", False)
    verbose: bool = option("Show what Ray and the engines print.", False)
