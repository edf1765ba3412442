"""`python -m penstock.engines.vllm.arguments.respond`, started by `check`: answers one question and exits."""

from __future__ import annotations

import json
import os
import sys

from penstock.engines.vllm.arguments.flags import parse
from penstock.engines.vllm.arguments.schema import faults, has_experts, plain


def main() -> None:
    """One JSON question on stdin, one JSON answer on stdout; whatever vLLM prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    if "argv" in question:
        kwargs, problems = parse(question["argv"])
        json.dump({"kwargs": kwargs, "problems": problems}, answer)
    elif "model" in question:
        json.dump({"experts": has_experts(**question)}, answer)
    else:
        found = [faults(kwargs) for kwargs in question["engine_kwargs"]]
        json.dump({"faults": found, "plain": plain()}, answer)
    answer.close()


if __name__ == "__main__":
    main()
