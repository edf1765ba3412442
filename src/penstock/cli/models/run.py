"""`penstock run`: starts a model, asks it one question, prints the answer, and ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.cli.models import precheck
from penstock.cli.models.options import RUN, Arguments, Engine
from penstock.cli.models.plan import make_plan
from penstock.errors import ConfigError

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def run(
    model: str,
    words: Sequence[str],
    engine_words: Sequence[str],
    *,
    system: str | None = None,
    max_tokens: int | None = None,
    engine: Engine | None = None,
    verbose: bool = False,
) -> int:
    """Exit code. words: the question; without any, it is read from the standard input.

    Raises: Error.
    """
    arguments = Arguments(sources=(model,), engine_words=tuple(engine_words), engine=engine)
    plan = precheck.checked(make_plan(arguments), None, RUN)
    if len(plan.configs) > 1:
        raise ConfigError(f"{model} describes {len(plan.configs)} models; name one.")
    question = " ".join(words) if words else sys.stdin.read()
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
        return _INTERRUPTED
    return 0
