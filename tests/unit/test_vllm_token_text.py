"""Text, token ids and stop strings of outputs, and what vLLM's parsers make of them. No engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from parsing import outputs, sizes, stops_held
from transformers import AddedToken, AutoTokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestState

import penstock
from penstock.engines.vllm.frontend import token_text

pytestmark = pytest.mark.parity("S11", "X8")

OWN_STATE = RequestState.from_new_request


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    tokenizer.add_tokens([AddedToken(f"<{mark}>", normalized=False) for mark in ("think", "/think")])
    return tokenizer


@pytest.fixture(autouse=True)
def stops() -> Iterator[None]:
    with stops_held():
        yield


SAYING = "<think>2 plus\n3 makes 5.</think>The sum is\n5. zz"


def ended(tokenizer: Any, saying: str, most: int, **params: Any) -> tuple[str, int, str | None, Any]:
    """Text, number of tokens, and why it ended, of an output; its parts must add up."""

    async def read() -> tuple[str, int, str | None, Any]:
        ids = [*tokenizer.encode(saying, add_special_tokens=False), tokenizer.eos_token_id]
        text, count, one = "", 0, None
        async for output in outputs(tokenizer, ids, sizes(most, seed=7), **params):
            (one,) = output.outputs
            text, count = text + one.text, count + len(one.token_ids)
            if one.finish_reason is None:
                assert tokenizer.decode(ids[:count]) == text
        assert one is not None
        return text, count, one.finish_reason, one.stop_reason

    return asyncio.run(read())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop", [["plus"], ["sum is"], ["\n"], ["m", "akes"], [". zz", "5. "], ["@"], ["</think>T"]]
)
def test_stop_strings_end_outputs_where_vllm_ends_them(tokenizer: Any, stop: list[str], include: bool):
    params: Any = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": 3}
    ours = [ended(tokenizer, SAYING, most, **params) for most in (1, 2, 16, 1000)]
    RequestState.from_new_request = OWN_STATE
    ids = [*tokenizer.encode(SAYING, add_special_tokens=False), tokenizer.eos_token_id]

    async def read() -> tuple[str, int, str | None, Any]:
        found = [one.outputs[0] async for one in outputs(tokenizer, ids, sizes(1, 7), **params)]
        text, count = "".join(one.text for one in found), sum(len(one.token_ids) for one in found)
        return text, count, found[-1].finish_reason, found[-1].stop_reason

    assert ours == [asyncio.run(read())] * 4


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["plus", "makes"], SAYING, None),
        (["\n"], "<think>2 plus\n3 makes 5.</think>The sum is", "\n"),
        (["5.", "zz"], "<think>2 plus\n3 makes 5.</think>The sum is\n", "5."),
        (["5.</think>T", "k>The"], SAYING, None),
        (["The"], "<think>2 plus\n3 makes 5.</think>", "The"),
    ],
)
def test_stop_strings_count_after_the_reasoning(
    tokenizer: Any, most: int, stop: list[str], text: str, reason: Any
):
    seen = ended(tokenizer, SAYING, most, stop=stop, reasons=True)
    assert (seen[0], seen[2], seen[3]) == (text, "stop", reason)


def test_text_that_begins_no_stop_string_is_sent_at_once(tokenizer: Any):
    ids = [*tokenizer.encode("The sum is 5. Observations", add_special_tokens=False), tokenizer.eos_token_id]

    async def read() -> list[str]:
        found = outputs(tokenizer, ids, sizes(1, 7), stop=["Observation: ", "@" * 40])
        return [one.outputs[0].text async for one in found]

    texts = asyncio.run(read())
    assert "".join(texts) == "The sum is 5. Observations"
    assert len(texts) > len(ids) // 2
    assert max(map(len, texts)) <= len(" Observations")


def test_tokens_whose_texts_do_not_add_up_stay_together(tokenizer: Any):
    ids = tokenizer.encode("The sum is 5.", add_special_tokens=False)

    async def read() -> list[list[int]]:
        async def given() -> AsyncGenerator[Any, None]:
            async for output in outputs(tokenizer, ids, sizes(1000, 7)):
                output.outputs[0].text = "Another text"
                yield output

        cut = token_text.single_tokens(given(), tokenizer, SamplingParams())
        return [list(one.outputs[0].token_ids) async for one in cut]

    assert asyncio.run(read()) == [ids]
