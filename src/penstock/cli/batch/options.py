"""The options of `penstock batch`, as typer reads them: first those that `run` and `resume` share."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from penstock.cli.models.options import API_KEY_NAMES
from penstock.cli.models.options import Engine as EngineName

_engine_option = partial(typer.Option, rich_help_panel="Engines")
_row_option = partial(typer.Option, rich_help_panel="Rows")
_limit_option = partial(typer.Option, rich_help_panel="Limits")
_report_option = partial(typer.Option, rich_help_panel="Report")

Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the job.")]
Url = Annotated[str | None, _engine_option(help="OpenAI-compatible service to send requests to.")]
App = Annotated[str | None, _engine_option(help="Application on a Ray cluster to send requests to.")]
Deployment = Annotated[
    str | None, _engine_option(help="With --app: deployment to use, when it serves several models.")
]
Model = Annotated[
    str | None,
    _engine_option(
        help="Model to load (hub id, folder or CONFIG.yaml); with --url or --app, the name of the model."
    ),
]
Submit = Annotated[
    str | None, _engine_option(help="Service whose Batches API runs INPUT, a file of OpenAI's batch lines.")
]
Window = Annotated[
    str | None,
    _limit_option(help="With --submit: time for the whole batch, as 90m, 24h or 7d.", show_default="24h"),
]
Key = Annotated[str | None, _engine_option(help="Key of the service.", envvar=API_KEY_NAMES)]
Replicas = Annotated[int | None, _engine_option(help="Number of engines to start.", min=1)]
Address = Annotated[
    str | None, _engine_option(help="Ray cluster to use (host:port, or auto).", envvar="RAY_ADDRESS")
]
MaxSeconds = Annotated[float | None, _limit_option(help="Stop after this many seconds.", min=0.0)]
MaxTotalTokens = Annotated[
    int | None, _limit_option(help="Stop after this many tokens of prompts and answers.", min=1)
]
MaxFailures = Annotated[int | None, _limit_option(help="Stop when this many rows have failed.", min=1)]
Report = Annotated[str | None, _report_option(help="Write the report as JSON to this file.")]
PriceIn = Annotated[float | None, _report_option(help="Price of a million prompt tokens.", min=0)]
PriceOut = Annotated[float | None, _report_option(help="Price of a million generated tokens.", min=0)]
FailOnErrors = Annotated[
    bool, _report_option("--fail-on-errors", help="Exit with 1 when any row failed, not only when all did.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what Ray and the engines print.")]
Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders, globs.")]
NewOutput = Annotated[
    str, typer.Option("--output", "-o", help="A file, or a folder of part files when it ends with /.")
]
Engine = Annotated[
    EngineName | None, _engine_option(help="`sim` is a simulator.", case_sensitive=False, show_default="vllm")
]
Accelerator = Annotated[str | None, _engine_option(help="`cpu`, `gpu`, or Ray's name of a GPU type.")]
Concurrency = Annotated[
    int | None,
    _engine_option(help="Maximum number of concurrent requests to --url.", min=1, show_default="64"),
]
Task = Annotated[
    Literal["generate", "embed", "classify", "score"], _row_option(help="What the model does with a row.")
]
Prompt = Annotated[
    str | None, _row_option(help="Prompt template with columns in braces: `Summarise: {text}`.")
]
System = Annotated[str | None, _row_option(help="With --prompt: a system prompt.")]
NoChat = Annotated[bool, _row_option("--no-chat", help="Send prompts as they are, not as chat messages.")]
MaxTokens = Annotated[int | None, _row_option(help="Most tokens of an answer.", min=1)]
Param = Annotated[list[str] | None, _row_option(help="NAME=VALUE to add to every request: `temperature=0`.")]
InputForm = Annotated[
    Literal["jsonl", "parquet", "csv", "tsv"] | None,
    _row_option(help="Format of INPUT.", show_default="by its name"),
]
AnswerColumn = Annotated[
    str | None,
    _row_option(
        metavar="NAME",
        help="Write every row, also failed ones, with its answer in NAME, and `error`; no more.",
    ),
]
Limit = Annotated[int | None, _row_option(help="Process only the first N rows.", min=1)]
Reuse = Annotated[
    Literal["exact", "all", "off"],
    _row_option(
        help="Send identical requests once: `exact` only where the answer would be the same "
        "(temperature 0, a seed, embeddings)."
    ),
]
ReuseFrom = Annotated[str | None, _row_option(help="Reuse answers of another job's output, too.")]
NoGroupPrefixes = Annotated[
    bool, _row_option("--no-group-prefixes", help="Do not group rows with the same prefix.")
]
NoReadFiles = Annotated[
    bool,
    _row_option(
        "--no-read-files", help="Refuse rows that name files or buckets. For rows from untrusted sources."
    ),
]
Attempts = Annotated[
    int, _limit_option(help="How often a row is tried before a temporary error fails it.", min=1)
]
Deadline = Annotated[float | None, _limit_option(help="Seconds for all attempts of a row.", min=0.001)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check all rows and show the first prompts; send nothing.")
]
