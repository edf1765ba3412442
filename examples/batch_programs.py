"""Several turns for each row, on one engine: each row is a small program, and all share the engine's batch.

A program may ask as often as it likes, one after another or side by side; whatever it raises is its row's
error alone.
"""

import asyncio

import ray

from penstock.data import build_processor, vLLMEngineProcessorConfig

ASKED = {"temperature": 0, "max_tokens": 60}


async def explain(row: dict, llm) -> dict:
    draft = await llm.chat(f"What is {row['item']}?", **ASKED)
    again = [{"role": "user", "content": f"What is {row['item']}?"}, draft.message]
    longer, shorter = await asyncio.gather(
        llm.chat([*again, {"role": "user", "content": f"What is {row['item']}?"}], **ASKED),
        llm.chat(f"What is {row['item']}?", **ASKED | {"max_tokens": 8}),
    )
    return {"draft": draft.text, "second": longer.text, "short": shorter.text}


processor = build_processor(vLLMEngineProcessorConfig(model_source="demo"), program=explain)

for row in processor(ray.data.from_items(["Penstock", "a KV cache"])).take_all():
    print(row["item"], "-", row["short"], "- after", row["calls"], "calls")
