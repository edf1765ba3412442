"""Greedy answers of one engine, in a process of its own: what Penstock must not change.

`python answers.py MODEL bare|penstock [NAME=VALUE ...]`, engine arguments in JSON. Prints a line of JSON:
by way of asking, an answer to each question. Ways that a bare vLLM has, too: `tokens` of a prompt, `chat`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

TOKENS = 48
CHAT = "/v1/chat/completions"
Answers = dict[str, list[Any]]


def questions() -> list[str]:
    from recipes.adapters.answers import BASE_ANSWERS

    return list(BASE_ANSWERS)


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Alike for all; a cache of prefixes would make what is computed depend on what was asked before."""
    from tests.device import DEVICE, SHARE

    usual: dict[str, Any] = {
        "max_model_len": 1024,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 26,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "max_num_batched_tokens": 2048,  # vLLM's defaults of these two depend on who starts it
        "max_num_seqs": 64,
    }
    return usual | ({"enforce_eager": True} if DEVICE == "cpu" else {}) | SHARE | given


def bare(model: str, given: dict[str, Any]) -> Answers:
    """vLLM alone."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **arguments(given))
    greedy, longer = (SamplingParams(temperature=0, max_tokens=count) for count in (TOKENS, 2 * TOKENS))
    tokens, chat = list[Any](), list[Any]()
    for question in questions():
        (output,) = llm.generate([question], greedy, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        (output,) = llm.chat([{"role": "user", "content": question}], longer, use_tqdm=False)
        chat.append(output.outputs[0].text)
    return {"tokens": tokens, "chat": chat}


async def penstock(model: str, given: dict[str, Any]) -> Answers:
    """The same, and each way in which a chat can be answered: whole, as a stream, as a row of a batch."""
    from asking import events, joined, user
    from enginetest import MODEL_ID, serve, vllm_config

    found: Answers = {"tokens": [], "chat": [], "stream": [], "row": []}
    async with serve(vllm_config(model, **arguments(given))) as served:
        engine: Any = served.engine
        for question in questions():
            greedy = {"temperature": 0, "max_tokens": TOKENS}
            deltas = [delta async for delta in engine.generate(question, greedy)]
            found["tokens"].append([token for delta in deltas for token in delta.token_ids])
            body = {"messages": user(question), "temperature": 0, "max_tokens": 2 * TOKENS}
            whole = await served.http.post(CHAT, json={"model": MODEL_ID} | body)
            found["chat"].append(_text(whole.content))
            found["stream"].append(joined(await events(served, CHAT, **body), "content"))
            asked = json.dumps({"model": MODEL_ID} | body).encode()
            row = await engine.respond(CHAT, asked)
            found["row"].append(_text(row) if row is not None else found["chat"][-1])
    return found


def _text(answer: bytes) -> str:
    return json.loads(answer)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    source, kind, *words = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    answers = bare(source, options) if kind == "bare" else asyncio.run(penstock(source, options))
    print(json.dumps(answers))
