"""`penstock run`: starts a model, asks it one question, prints the answer, and ends."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.models.options import RUN, Arguments, Engine, split
from penstock.cli.process.failure import INTERRUPTED
from penstock.errors import ConfigError


def run(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, or a CONFIG.yaml with one model.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUESTION]...", help="The standard input without it.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.", min=1)] = None,
    engine: Annotated[Engine | None, typer.Option(help="`sim` is a simulator.", show_default="vllm")] = None,
    verbose: Annotated[bool, typer.Option(help="Show what the engine prints.")] = False,
) -> int:
    """Ask a model one question without a service: start it, print the answer, end it.

    Options that are not listed below are the engine's, as for `penstock serve`; write them last.

    - `penstock run Qwen/Qwen2.5-0.5B-Instruct "What is a KV cache?"`
    - `penstock run ./my-model --max-model-len 8192 < question.txt`
    """
    from penstock.cli.models import precheck
    from penstock.cli.models.plan import make_plan

    asked, engine_words = split(words or [])
    arguments = Arguments(sources=(model,), engine_words=engine_words, engine=engine)
    plan = precheck.checked(make_plan(arguments), None, RUN)
    if len(plan.configs) > 1:
        raise ConfigError(f"{model} describes {len(plan.configs)} models; name one.")
    question = " ".join(asked) if asked else sys.stdin.read()
    if not question.strip():
        raise ConfigError(f'Ask something: penstock run {model} "What is a KV cache?"')
    messages = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if sys.stderr.isatty():
        print(f"Loading {model} ...", file=sys.stderr)

    from penstock.data.table.llm import LLM

    try:
        with LLM(config=plan.configs[0], verbose=verbose) as llm:
            print(llm.ask(messages, schema=None, max_tokens=max_tokens))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
