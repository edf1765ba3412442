"""What the user may write after `penstock bench`, with defaults and help.

Imports no other part of the bench, so that `--help` is there at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

INPUT, OUTPUT, CONCURRENCY, SECONDS, WARMUP_S = "512", "128", "16", 30.0, 3.0

_service = partial(typer.Option, rich_help_panel="Service")
_load = partial(typer.Option, rich_help_panel="Load")
_request = partial(typer.Option, rich_help_panel="Requests")
_report = partial(typer.Option, rich_help_panel="Report")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options as they were written; None where nothing was."""

    url: Annotated[str, typer.Argument(help="Address of the service.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, _service(help="Model to load.", show_default="the first")] = None
    api_key: Annotated[
        str | None, _service(help="Key of the service.", envvar=["PENSTOCK_API_KEY", "VLLM_API_KEY"])
    ] = None
    endpoint: Annotated[Literal["chat", "completions"], _service(help="API to load.")] = "chat"
    concurrency: Annotated[
        str | None,
        _load(
            help="Concurrent users: `16`, or one level after the other `1,16,64`.", show_default=CONCURRENCY
        ),
    ] = None
    rate: Annotated[
        str | None,
        _load(help="Open-loop arrival rate in requests/s: `5`, or a sweep `1,2,4`. Replaces --concurrency."),
    ] = None
    steady: Annotated[bool, _load("--steady", help="With --rate: even intervals instead of Poisson.")] = False
    trace: Annotated[
        Path | None,
        _load(help="Replay arrivals and lengths of a JSONL or CSV file. Replaces --concurrency."),
    ] = None
    trace_speed: Annotated[float, _load(help="Speed-up of the trace.", min=0.001)] = 1.0
    seconds: Annotated[
        float | None,
        _load(help="Measured seconds of each level.", min=0.1, show_default=f"{SECONDS:g}"),
    ] = None
    requests: Annotated[int | None, _load(help="Requests of each level, instead of --seconds.", min=1)] = None
    conversations: Annotated[
        int | None, _load(help="Conversations of each level, instead of --seconds.", min=1)
    ] = None
    warmup: Annotated[
        float | None,
        _load(help="Seconds of load before each level's measured time.", min=0, show_default=f"{WARMUP_S:g}"),
    ] = None
    input: Annotated[
        str | None, _request(help="Tokens of each prompt, or of each turn.", show_default=INPUT)
    ] = None
    output: Annotated[str | None, _request(help="Tokens of each answer.", show_default=OUTPUT)] = None
    turns: Annotated[int, _request(help="Turns of each conversation.", min=1)] = 1
    think: Annotated[float, _request(help="Seconds between an answer and the next turn.", min=0)] = 0.0
    shared_prefix: Annotated[
        int, _request(help="Tokens of a system prompt that conversations share.", min=0)
    ] = 0
    prefixes: Annotated[int, _request(help="Number of different shared prefixes.", min=1)] = 1
    prompts: Annotated[
        Path | None, _request(help="Send the requests of this file: one JSON body per line.")
    ] = None
    body: Annotated[str | None, _request(help="JSON to add to every request: `'{\"temperature\": 0}'`.")] = (
        None
    )
    ignore_eos: Annotated[
        bool | None,
        _request(
            help="Generate exactly as many tokens as requested.", show_default="yes, except with --prompts"
        ),
    ] = None
    slo: Annotated[
        str | None, _report(help="Latency targets for goodput: `ttft=200ms,itl=30ms,tpot=,e2e=`.")
    ] = None
    timeout: Annotated[float, _load(help="Seconds after which a request fails.", min=0.1)] = 300.0
    workers: Annotated[
        int | None, _load(help="Client processes.", min=1, show_default="as many as needed")
    ] = None
    seed: Annotated[int, _load(help="Seed of lengths and arrivals. Texts differ in every run.")] = 0
    insecure: Annotated[bool, _service("--insecure", help="Do not verify the TLS certificate.")] = False


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write what, beside the table; None for not at all."""

    json: Annotated[Path | None, _report(help="Write all figures to this file.")] = None
    html: Annotated[Path | None, _report(help="Write an HTML page with plots to this file.")] = None
    records: Annotated[Path | None, _report(help="Write one line per request to this file.")] = None
