"""The words of the command line. Each command imports what it needs when it runs: `--help` is instant."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from penstock import __version__
from penstock.cli.arguments import DEFAULT_PORT, KINDS, Arguments, split
from penstock.errors import ConfigError, Error

app = typer.Typer(
    name="penstock",
    help="One fleet of LLM engines on Ray, for online serving and offline batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_SERVE_HELP = """
Serve models behind one OpenAI-compatible address.

MODEL is a hub id or a local folder; CONFIG.yaml describes one model or many. Without either, the small model
that ships with Penstock is served. Options that are not listed below go to the engine under the names of
`vllm serve`; write them after the model.

- `penstock serve`
- `penstock serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 8192 --replicas 2`
- `penstock serve ./my-model --served-model-name mine --tensor-parallel-size 2 --port 9000`
- `penstock serve qwen.yaml llama.yaml --host 0.0.0.0`
- `penstock serve --engine sim`
"""

_CHAT_HELP = """
Talk to a service that runs, from the terminal.

Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, each line of the input is a question.

- `penstock chat`
- `penstock chat --url http://gpu-box:8000 --model qwen --system "Answer in one sentence."`
- `echo "What is Penstock?" | penstock chat`
"""

_CHECK_HELP = """
Report every mistake of configs at once, and what they would place where.

Starts neither Ray nor a model, and needs no GPU.

- `penstock check models/*.yaml`
"""

_BENCH_HELP = """
Load an OpenAI-compatible service and report what it did: TTFT, ITL, TPOT, tokens per second, errors.

URL is any service: ours, vLLM, a hosted one. By default 16 users ask for 30 s, each waiting for its answer,
with prompts of 512 tokens and answers of 128. Lengths are written `512`, `256-1024`, `normal:512:0.3` or
`lognormal:512:0.8` (mean and coefficient of variation). Ctrl-C ends it with the report so far.

- `penstock bench http://127.0.0.1:8000`
- `penstock bench http://gpu-box:8000 --concurrency 1,16,64 --slo ttft=200ms,itl=30ms --html report.html`
- `penstock bench http://gpu-box:8000 --rate 5 --input lognormal:1000:0.8 --output 50-400`
- `penstock bench http://gpu-box:8000 --turns 5 --shared-prefix 2000 --conversations 200`
- `penstock bench http://gpu-box:8000 --trace conversation_trace.jsonl --seconds 600`
"""


@app.callback(invoke_without_command=True)
def penstock(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show_version:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.command(help=_SERVE_HELP, context_settings={"ignore_unknown_options": True})
def serve(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL | CONFIG.yaml]...", help="What to serve.", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on.", min=1, max=65535, show_default=str(DEFAULT_PORT)),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send. Better given as PENSTOCK_API_KEY: others can see arguments."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name that clients use for MODEL."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of each model.", min=1)] = None,
    engine: Annotated[str | None, typer.Option(help="`vllm`, or `sim`: a simulator without a model.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="`cpu`, `gpu`, or Ray's name of a GPU type (L4, A10G, H100, ...).")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to use (host:port, or auto). It is left running.", envvar="RAY_ADDRESS"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Serve application.")] = "penstock",
    log_format: Annotated[str | None, typer.Option(help="`text` or `json`.", show_default="text")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what Ray and the engines print.")] = False,
) -> None:
    from penstock.cli import processes

    sources, engine_words = split(words or [])
    arguments = Arguments(
        sources=sources,
        engine_words=engine_words,
        host=host,
        port=port,
        api_key=api_key,
        log_format=log_format,
        served_model_name=served_model_name,
        replicas=replicas,
        engine=engine,
        accelerator=accelerator,
        address=None if address in ("", "local") else address,  # Ray's word for a cluster of one's own
        name=name,
        verbose=verbose,
    )
    if accelerator in KINDS:
        os.environ["PENSTOCK_ACCELERATOR"] = accelerator
    from penstock.cli.serve import STOP_S

    sys.exit(processes.guarded(partial(_serve, arguments), stop_s=STOP_S))


def _serve(arguments: Arguments, told: int) -> int:
    from penstock.cli.arguments import plan
    from penstock.cli.port import refuse_silent, refuse_taken
    from penstock.cli.serve import run

    try:
        planned = plan(arguments)
        refuse_taken(planned.gateway.host, planned.gateway.port or DEFAULT_PORT)
        if arguments.address:
            refuse_silent(arguments.address)
    except Error as error:
        _fail("serve", error)
    return run(planned, arguments, told)


@app.command(help=_CHAT_HELP)
def chat(
    url: Annotated[str, typer.Option(help="Address of the service.")] = f"http://127.0.0.1:{DEFAULT_PORT}",
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="its first")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the service.", envvar="PENSTOCK_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    from penstock.cli.chat import Service
    from penstock.cli.chat import chat as talk

    try:
        code = talk(Service(url, api_key), sys.stdin, model=model, system=system)
    except Error as error:
        _fail("chat", error)
    sys.exit(code)


@app.command(help=_CHECK_HELP)
def check(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG.yaml...", help="Files to check.")],
) -> None:
    from penstock.cli.check import check as report

    try:
        code = report(configs)
    except Error as error:
        _fail("check", error)
    sys.exit(code)


@app.command(help=_BENCH_HELP)
def bench(
    url: Annotated[str, typer.Argument(help="Address of the service.")] = f"http://127.0.0.1:{DEFAULT_PORT}",
    model: Annotated[str | None, typer.Option(help="Model to ask.", show_default="its first")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the service.", envvar="PENSTOCK_API_KEY")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="`chat` or `completions`.")] = "chat",
    concurrency: Annotated[
        str | None,
        typer.Option(help="Users at the same time, one level after the other: `1,16,64`.", show_default="16"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Instead: requests per second, whatever the answers do: `5` or `1,2,4`."),
    ] = None,
    steady: Annotated[
        bool, typer.Option("--steady", help="With --rate: even intervals, not Poisson.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Instead: arrivals and lengths of a JSONL or CSV file.")
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(help="Play the trace so many times as fast.", min=0.001)
    ] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="Measured time of each level.", min=0.1, show_default="30")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each level, instead of a time.", min=1)
    ] = None,
    conversations: Annotated[
        int | None, typer.Option(help="Conversations of each level, instead of a time.", min=1)
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="Seconds of load before each level's measured time.", min=0, show_default="3"),
    ] = None,
    input: Annotated[
        str | None, typer.Option(help="Tokens of each prompt, or of each turn.", show_default="512")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Tokens of each answer.", show_default="128")] = None,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.", min=1)] = 1,
    think: Annotated[float, typer.Option(help="Seconds between an answer and the next turn.", min=0)] = 0.0,
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens of a system prompt that conversations share.", min=0)
    ] = 0,
    prefixes: Annotated[int, typer.Option(help="How many such prompts there are.", min=1)] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="Ask what this file holds: a request's body in each line.")
    ] = None,
    body: Annotated[
        str | None, typer.Option(help="JSON to add to every request: `'{\"temperature\": 0}'`.")
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(help="Make answers exactly as long as asked.", show_default="yes, but for --prompts"),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="What is good enough, for goodput: `ttft=200ms,itl=30ms,tpot=,e2e=`.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request has failed.", min=0.1)] = 300.0,
    workers: Annotated[
        int | None, typer.Option(help="Processes that ask.", min=1, show_default="as many as needed")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals. Texts are new in every run.")] = 0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the certificate.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write a line for each request to this file.")] = None,
    fail_on_errors: Annotated[
        bool,
        typer.Option("--fail-on-errors", help="Exit with 1 when any request failed, not only when all did."),
    ] = False,
) -> None:
    from penstock.bench.settings import Words
    from penstock.cli.bench import Files
    from penstock.cli.bench import bench as measure

    words = Words(
        url=url,
        model=model,
        api_key=api_key,
        insecure=insecure,
        endpoint=endpoint,
        concurrency=concurrency,
        rate=rate,
        steady=steady,
        trace=trace,
        trace_speed=trace_speed,
        seconds=seconds,
        requests=requests,
        conversations=conversations,
        warmup=warmup,
        input=input,
        output=output,
        turns=turns,
        think=think,
        shared_prefix=shared_prefix,
        prefixes=prefixes,
        prompts=prompts,
        body=body,
        ignore_eos=ignore_eos,
        slo=slo,
        timeout=timeout,
        workers=workers,
        seed=seed,
    )
    try:
        code = measure(words, Files(json, html, records), fail_on_errors=fail_on_errors)
    except Error as error:
        _fail("bench", error)
    sys.exit(code)


def _fail(command: str, error: Error) -> NoReturn:
    print(f"penstock {command}: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)
