"""`penstock bench`. The work is in `penstock.bench`, imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.run.options import BenchOptions, Files


def bench(
    options: BenchOptions,
    files: Files,
    fail_on_errors: Annotated[
        bool,
        typer.Option(
            "--fail-on-errors",
            help="Exit with 1 when any request failed, not only when all did.",
            rich_help_panel="Report",
        ),
    ] = False,
) -> int:
    """Load an OpenAI-compatible service and report TTFT, ITL, TPOT, tokens per second and errors.

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
    from penstock.bench.report.command import measure

    return measure(options, files, fail_on_errors=fail_on_errors)
