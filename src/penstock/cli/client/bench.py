"""The options of `penstock bench`. The work is in `penstock.bench`, imported when it runs."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.client.options import API_KEY_NAMES
from penstock.cli.models.options import DEFAULT_PORT
from penstock.cli.process.failure import fail
from penstock.errors import Error

BENCH_HELP = """
Load an OpenAI-compatible service and report TTFT, ITL, TPOT, tokens per second and errors.

URL is any service: Penstock, vLLM, a hosted one. By default 16 users send requests for 30 s, each waiting
for its answer, with prompts of 512 tokens and answers of 128. Lengths are written `512`, `256-1024`,
`normal:512:0.3` or `lognormal:512:0.8` (mean and coefficient of variation). Ctrl-C ends the run with
the report so far.

- `penstock bench http://127.0.0.1:8000`
- `penstock bench http://gpu-box:8000 --concurrency 1,16,64 --slo ttft=200ms,itl=30ms --html report.html`
- `penstock bench http://gpu-box:8000 --rate 5 --input lognormal:1000:0.8 --output 50-400`
- `penstock bench http://gpu-box:8000 --turns 5 --shared-prefix 2000 --conversations 200`
- `penstock bench http://gpu-box:8000 --trace conversation_trace.jsonl --seconds 600`
"""


def bench(
    url: Annotated[str, typer.Argument(help="Address of the service.")] = f"http://127.0.0.1:{DEFAULT_PORT}",
    model: Annotated[
        str | None, typer.Option(help="Model to load.", show_default="the first", rich_help_panel="Service")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of the service.", envvar=API_KEY_NAMES, rich_help_panel="Service"),
    ] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="API to load.", rich_help_panel="Service")
    ] = "chat",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Concurrent users: `16`, or one level after the other `1,16,64`.",
            show_default="16",
            rich_help_panel="Load",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Open-loop arrival rate in requests/s: `5`, or a sweep `1,2,4`. Replaces --concurrency.",
            rich_help_panel="Load",
        ),
    ] = None,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady", help="With --rate: even intervals instead of Poisson.", rich_help_panel="Load"
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay arrivals and lengths of a JSONL or CSV file. Replaces --concurrency.",
            rich_help_panel="Load",
        ),
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(help="Speed-up of the trace.", min=0.001, rich_help_panel="Load")
    ] = 1.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Measured seconds of each level.", min=0.1, show_default="30", rich_help_panel="Load"
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests of each level, instead of --seconds.", min=1, rich_help_panel="Load"),
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(
            help="Conversations of each level, instead of --seconds.", min=1, rich_help_panel="Load"
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Seconds of load before each level's measured time.",
            min=0,
            show_default="3",
            rich_help_panel="Load",
        ),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(
            help="Tokens of each prompt, or of each turn.", show_default="512", rich_help_panel="Requests"
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Tokens of each answer.", show_default="128", rich_help_panel="Requests"),
    ] = None,
    turns: Annotated[
        int, typer.Option(help="Turns of each conversation.", min=1, rich_help_panel="Requests")
    ] = 1,
    think: Annotated[
        float,
        typer.Option(help="Seconds between an answer and the next turn.", min=0, rich_help_panel="Requests"),
    ] = 0.0,
    shared_prefix: Annotated[
        int,
        typer.Option(
            help="Tokens of a system prompt that conversations share.", min=0, rich_help_panel="Requests"
        ),
    ] = 0,
    prefixes: Annotated[
        int, typer.Option(help="Number of different shared prefixes.", min=1, rich_help_panel="Requests")
    ] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Send the requests of this file: one JSON body per line.", rich_help_panel="Requests"
        ),
    ] = None,
    body: Annotated[
        str | None,
        typer.Option(
            help="JSON to add to every request: `'{\"temperature\": 0}'`.", rich_help_panel="Requests"
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            help="Generate exactly as many tokens as requested.",
            show_default="yes, except with --prompts",
            rich_help_panel="Requests",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Latency targets for goodput: `ttft=200ms,itl=30ms,tpot=,e2e=`.",
            rich_help_panel="Report",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request fails.", min=0.1, rich_help_panel="Load")
    ] = 300.0,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Client processes.", min=1, show_default="as many as needed", rich_help_panel="Load"
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of lengths and arrivals. Texts differ in every run.", rich_help_panel="Load"),
    ] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not verify the TLS certificate.", rich_help_panel="Service")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write all figures to this file.", rich_help_panel="Report")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page with plots to this file.", rich_help_panel="Report"),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Write one line per request to this file.", rich_help_panel="Report"),
    ] = None,
    fail_on_errors: Annotated[
        bool,
        typer.Option(
            "--fail-on-errors",
            help="Exit with 1 when any request failed, not only when all did.",
            rich_help_panel="Report",
        ),
    ] = False,
) -> None:
    given = locals()
    from penstock.bench.report.command import Files, measure
    from penstock.bench.run.settings import BenchOptions

    options = BenchOptions(**{option.name: given[option.name] for option in fields(BenchOptions)})
    try:
        code = measure(options, Files(json, html, records), fail_on_errors=fail_on_errors)
    except Error as error:
        fail("bench", error)
    sys.exit(code)
