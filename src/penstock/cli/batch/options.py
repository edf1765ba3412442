"""The options of `penstock batch`, as typer reads them: first those that `run` and `resume` share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from penstock.cli.models.options import API_KEY_NAMES
from penstock.cli.models.options import Engine as EngineName

_ENGINES, _ROWS, _LIMITS, _REPORT = "Engines", "Rows", "Limits", "Report"

Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the job.")]
Url = Annotated[
    str | None,
    typer.Option(help="OpenAI-compatible service to send requests to.", rich_help_panel=_ENGINES),
]
App = Annotated[
    str | None,
    typer.Option(help="Application on a Ray cluster to send requests to.", rich_help_panel=_ENGINES),
]
Deployment = Annotated[
    str | None,
    typer.Option(
        help="With --app: deployment to use, when it serves several models.", rich_help_panel=_ENGINES
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to load (hub id, folder or CONFIG.yaml); with --url or --app, the name of the model.",
        rich_help_panel=_ENGINES,
    ),
]
Submit = Annotated[
    str | None,
    typer.Option(
        help="Service whose Batches API runs INPUT, a file of OpenAI's batch lines.",
        rich_help_panel=_ENGINES,
    ),
]
Window = Annotated[
    str | None,
    typer.Option(
        help="With --submit: time for the whole batch, as 90m, 24h or 7d.",
        rich_help_panel=_LIMITS,
        show_default="24h",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(help="Key of the service.", envvar=API_KEY_NAMES, rich_help_panel=_ENGINES),
]
Replicas = Annotated[
    int | None,
    typer.Option(help="Number of engines to start.", min=1, rich_help_panel=_ENGINES),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to use (host:port, or auto).", envvar="RAY_ADDRESS", rich_help_panel=_ENGINES
    ),
]
MaxSeconds = Annotated[
    float | None, typer.Option(help="Stop after this many seconds.", min=0.0, rich_help_panel=_LIMITS)
]
MaxTotalTokens = Annotated[
    int | None,
    typer.Option(help="Stop after this many tokens of prompts and answers.", min=1, rich_help_panel=_LIMITS),
]
MaxFailures = Annotated[
    int | None, typer.Option(help="Stop when this many rows have failed.", min=1, rich_help_panel=_LIMITS)
]
Report = Annotated[
    str | None, typer.Option(help="Write the report as JSON to this file.", rich_help_panel=_REPORT)
]
PriceIn = Annotated[
    float | None, typer.Option(help="Price of a million prompt tokens.", min=0, rich_help_panel=_REPORT)
]
PriceOut = Annotated[
    float | None, typer.Option(help="Price of a million generated tokens.", min=0, rich_help_panel=_REPORT)
]
FailOnErrors = Annotated[
    bool,
    typer.Option(
        "--fail-on-errors",
        help="Exit with 1 when any row failed, not only when all did.",
        rich_help_panel=_REPORT,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what Ray and the engines print.")]
Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders, globs.")]
NewOutput = Annotated[
    str, typer.Option("--output", "-o", help="A file, or a folder of part files when it ends with /.")
]
Engine = Annotated[
    EngineName | None,
    typer.Option(
        help="`sim` is a simulator.", case_sensitive=False, show_default="vllm", rich_help_panel=_ENGINES
    ),
]
Accelerator = Annotated[
    str | None,
    typer.Option(help="`cpu`, `gpu`, or Ray's name of a GPU type.", rich_help_panel=_ENGINES),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        help="Most concurrent requests to --url.",
        min=1,
        rich_help_panel=_ENGINES,
        show_default="64",
    ),
]
Task = Annotated[
    Literal["generate", "embed", "classify", "score"],
    typer.Option(help="What the model does with a row.", rich_help_panel=_ROWS),
]
Prompt = Annotated[
    str | None,
    typer.Option(help="Prompt template with columns in braces: `Summarise: {text}`.", rich_help_panel=_ROWS),
]
System = Annotated[str | None, typer.Option(help="With --prompt: a system prompt.", rich_help_panel=_ROWS)]
NoChat = Annotated[
    bool,
    typer.Option(
        "--no-chat", help="Send --prompt as a plain prompt, not as a message.", rich_help_panel=_ROWS
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of an answer.", min=1, rich_help_panel=_ROWS)
]
Param = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE to add to every request: `temperature=0`.", rich_help_panel=_ROWS),
]
InputForm = Annotated[
    Literal["jsonl", "parquet", "csv"] | None,
    typer.Option(help="Format of INPUT.", show_default="by its name", rich_help_panel=_ROWS),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many rows.", min=1, rich_help_panel=_ROWS)]
Reuse = Annotated[
    Literal["exact", "all", "off"],
    typer.Option(
        help="Send identical requests once: `exact` only where the answer would be the same "
        "(temperature 0, a seed, embeddings).",
        rich_help_panel=_ROWS,
    ),
]
ReuseFrom = Annotated[
    str | None,
    typer.Option(help="Reuse answers of another job's output, too.", rich_help_panel=_ROWS),
]
NoGroupPrefixes = Annotated[
    bool,
    typer.Option(
        "--no-group-prefixes",
        help="Do not group rows with the same prefix.",
        rich_help_panel=_ROWS,
    ),
]
NoReadFiles = Annotated[
    bool,
    typer.Option(
        "--no-read-files",
        help="Refuse rows that name files or buckets. For rows from untrusted sources.",
        rich_help_panel=_ROWS,
    ),
]
Attempts = Annotated[
    int,
    typer.Option(help="Attempts for a row that is refused temporarily.", min=1, rich_help_panel=_LIMITS),
]
Deadline = Annotated[
    float | None,
    typer.Option(help="Seconds for all attempts of a row.", min=0.001, rich_help_panel=_LIMITS),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check all rows and show the first prompts; send nothing."),
]
