"""Streamed thoughts are the same however their tokens come in deltas. vLLM's own parsers; no engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager

import penstock
from penstock.engines.vllm.frontend import reasoning_stream

pytestmark = pytest.mark.parity("S11", "X8")

REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "What is 2 + 3?"}], stream=True)
SAYINGS = {
    "<think>2 and 3</think>It is 5": ("2 and 3", "It is 5"),
    "Hm<think>2 and 3</think>5": ("Hm2 and 3", "5"),
    "2 and 3</think>It is 5": ("2 and 3", "It is 5"),
    "<think>2 and 3": ("2 and 3", ""),
    "<think></think>It is 5": ("", "It is 5"),
}
"""What a model says, with the thoughts and the text in it as tokens that come one by one give them."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def cuts(length: int) -> Iterator[list[int]]:
    """Every way of cutting so many tokens into deltas: where each delta ends."""
    for number in range(length):
        for ends in combinations(range(1, length), number):
            yield [*ends, length]


def streamed(parser: Any, tokenizer: Any, ids: list[int], ends: list[int]) -> tuple[str, str]:
    """Thoughts and text of a stream of these deltas, joined."""
    reasoning = content = ""
    begin = 0
    for end in ends:
        text = tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[:begin])) :]
        delta = parser.parse_delta(text, ids[begin:end], REQUEST, [1], finished=end == len(ids))
        reasoning += (delta and delta.reasoning) or ""
        content += (delta and delta.content) or ""
        begin = end
    return reasoning, content


@pytest.mark.parametrize("name", ["deepseek_r1", "ernie45", "holo2", "hy_v4", "qwen3"])
def test_every_cut_gives_the_same_thoughts_and_text(tokenizer: Any, name: str):
    reasoning_stream.read_alone(name)
    parser_class: Any = ParserManager.get_parser(reasoning_parser_name=name)
    for said, parts in SAYINGS.items():
        ids = tokenizer.encode(said, add_special_tokens=False)
        for ends in cuts(len(ids)):
            assert streamed(parser_class(tokenizer), tokenizer, ids, ends) == parts, (said, ends)


def test_a_parser_is_changed_once_and_one_that_reads_tokens_itself_never():
    own = ReasoningParserManager.get_reasoning_parser("qwen3")
    reasoning_stream.read_alone("qwen3")
    assert ReasoningParserManager.get_reasoning_parser("qwen3") is own
    reasoning_stream.read_alone("deepseek_r1")
    ours = ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    reasoning_stream.read_alone("deepseek_r1")
    assert ReasoningParserManager.get_reasoning_parser("deepseek_r1") is ours


def test_a_delta_whose_text_lacks_its_mark_is_left_whole(tokenizer: Any):
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
    mark = tokenizer.convert_tokens_to_ids("<think>")
    assert list(reasoning_stream.cut(parser, "so", [mark, 7])) == [("so", [mark, 7])]
    assert list(reasoning_stream.cut(parser, "<think>so", [mark, 7])) == [("<think>", [mark]), ("so", [7])]
