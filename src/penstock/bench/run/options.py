"""What the user may write after `penstock bench`, with defaults and help.

Imports no other part of the bench, so that `--help` is there at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from penstock.options import argument, option

INPUT, OUTPUT, CONCURRENCY, SECONDS, WARMUP_S = "512", "128", "16", 30.0, 3.0

_service = partial(option, rich_help_panel="Service")
_load = partial(option, rich_help_panel="Load")
_request = partial(option, rich_help_panel="Requests")
_report = partial(option, rich_help_panel="Report")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options as they were written; None where nothing was."""

    url: str = argument("Address of the service.", "http://127.0.0.1:8000")
    model: str | None = _service("Model to load.", show_default="the first")
    api_key: str | None = _service("Key of the service.", envvar=["PENSTOCK_API_KEY", "VLLM_API_KEY"])
    endpoint: Literal["chat", "completions"] = _service("API to load.", "chat")
    concurrency: str | None = _load(
        "Concurrent users: `16`, or one level after the other `1,16,64`.", show_default=CONCURRENCY
    )
    rate: str | None = _load(
        "Open-loop arrival rate in requests/s: `5`, or a sweep `1,2,4`. Replaces --concurrency."
    )
    steady: bool = _load("With --rate: even intervals instead of Poisson.", False)
    trace: Path | None = _load("Replay arrivals and lengths of a JSONL or CSV file. Replaces --concurrency.")
    trace_speed: float = _load("Speed-up of the trace.", 1.0, min=0.001)
    seconds: float | None = _load("Measured seconds of each level.", min=0.1, show_default=f"{SECONDS:g}")
    requests: int | None = _load("Requests of each level, instead of --seconds.", min=1)
    conversations: int | None = _load("Conversations of each level, instead of --seconds.", min=1)
    warmup: float | None = _load(
        "Seconds of load before each level's measured time.", min=0, show_default=f"{WARMUP_S:g}"
    )
    input: str | None = _request("Tokens of each prompt, or of each turn.", show_default=INPUT)
    output: str | None = _request("Tokens of each answer.", show_default=OUTPUT)
    turns: int = _request("Turns of each conversation.", 1, min=1)
    think: float = _request("Seconds between an answer and the next turn.", 0.0, min=0)
    shared_prefix: int = _request("Tokens of a system prompt that conversations share.", 0, min=0)
    prefixes: int = _request("Number of different shared prefixes.", 1, min=1)
    prompts: Path | None = _request("Send the requests of this file: one JSON body per line.")
    body: str | None = _request("JSON to add to every request: `'{\"temperature\": 0}'`.")
    ignore_eos: bool | None = _request(
        "Generate exactly as many tokens as requested.", show_default="yes, except with --prompts"
    )
    slo: str | None = _report("Latency targets for goodput: `ttft=200ms,itl=30ms,tpot=,e2e=`.")
    timeout: float = _load("Seconds after which a request fails.", 300.0, min=0.1)
    workers: int | None = _load("Client processes.", min=1, show_default="as many as needed")
    seed: int = _load("Seed of lengths and arrivals. Texts differ in every run.", 0)
    insecure: bool = _service("Do not verify the TLS certificate.", False)


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write what, beside the table; None for not at all."""

    json: Path | None = _report("Write all figures to this file.")
    html: Path | None = _report("Write an HTML page with plots to this file.")
    records: Path | None = _report("Write one line per request to this file.")
