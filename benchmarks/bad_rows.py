"""What comes out of rows that are wrong, of rows that differ, and of one that kills.

`python -m benchmarks.bad_rows`: 2,000 rows through a pipeline on a simulated engine: 1 % of each kind of
mistake, every other one with parameters of its own, and one that its engine dies of. It says how each ended.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from benchmarks.record import machine
from penstock.data import EngineProcessorConfig, LLMConfig, build_processor

ROWS = 2_000
POISON = "poison"
MISTAKES = (
    "not a dict",
    "unknown role",
    "too long",
    "bad schema",
    "bad image URL",
    "wrong type",
    "misspelt field",
    "preprocess raises",
)


def kind(row: dict[str, Any]) -> str:
    """1 % each; one row is poison, all others are good."""
    number = row["id"]
    if number == ROWS // 2 + 57:
        return POISON
    place = number % 100
    return MISTAKES[place] if place < len(MISTAKES) else "good"


def ask(row: dict[str, Any]) -> Any:
    text = f"row {row['id']}"
    messages = [{"role": "user", "content": text}]
    wrong: dict[str, Any] = {
        "not a dict": text,
        "unknown role": {"messages": [{"role": "robot", "content": text}]},
        "too long": {"messages": [{"role": "user", "content": text + " again" * 2_000}]},
        "bad schema": {"messages": messages, "response_format": {"type": "json_schema", "json_schema": 7}},
        "bad image URL": {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "nowhere"}}]}
            ]
        },
        "wrong type": {"messages": messages, "max_tokens": "many"},
        "misspelt field": {"messages": messages, "sampling_parms": {"temperature": 0}},
        POISON: {"prompt": POISON},
    }
    found = kind(row)
    if found == "preprocess raises":
        raise LookupError(f"nothing is known of {text}")
    return wrong.get(found) or good(row["id"], messages)


def good(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One of five shapes."""
    shapes: list[dict[str, Any]] = [
        {"max_tokens": 1 + number % 5},
        {"sampling_params": {"temperature": 0.5, "max_tokens": 3}, "n": 2},
        {"stop": [" "], "top_p": 0.9},
        {"sampling_params": {"seed": number}, "chat_template_kwargs": {"deep": {"empty": {}, "none": None}}},
        {"max_tokens": 2, "logit_bias": {"5": 1.0}},
    ]
    return {"messages": messages, **shapes[number % len(shapes)]}


def right(row: dict[str, Any]) -> bool:
    """Whether a good row was answered as it, and no other, asked."""
    texts, made, shape = row["generated_texts"], row["num_generated_tokens"], row["id"] % 5
    whole = f"row {row['id']}"
    if shape == 1:
        return len(texts) == 2 and made <= 6 and all(whole.startswith(text) for text in texts)
    if shape in (0, 4):
        return whole.startswith(texts[0]) and made <= (1 + row["id"] % 5 if shape == 0 else 2)
    return texts == (["row"] if shape == 2 else [whole])


def main() -> None:
    root = str(Path(__file__).parent.parent)
    os.environ["PENSTOCK_ENGINE_CLS"] = "tests.poisoned:Poisoned"
    os.environ["PYTHONPATH"] = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    engine = {"max_model_len": 512, "kv_tokens": 65_536, "step_base_ms": 1.0}
    config = LLMConfig(model_loading_config={"model_id": "sim"}, llm_engine="sim", engine_kwargs=engine)
    rows = build_processor(EngineProcessorConfig(llm_config=config), preprocess=ask)(
        [{"id": n} for n in range(ROWS)]
    )
    ray.shutdown()
    assert [row["id"] for row in rows] == list(range(ROWS))
    ends: dict[str, Counter[str]] = {}
    said: dict[str, str] = {}
    for row in rows:
        error = row["error"]
        end = (
            f"failed in {error['stage']}: `{error['code']}`"
            if error
            else "ok"
            if right(row)
            else "ok, but wrong"
        )
        ends.setdefault(kind(row), Counter())[end] += 1
        said.setdefault(kind(row), error["message"] if error else "")
    print(json.dumps(machine()))
    print("| rows | ended | what it says |\n|---|---|---|")
    for name, counts in ends.items():
        print(f"| {name} | {', '.join(f'{n} {end}' for end, n in counts.items())} | {said[name][:110]} |")


if __name__ == "__main__":
    main()
