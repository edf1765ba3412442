"""Text, token ids and stop strings of outputs, and what vLLM's parsers make of them. No engine runs."""

# ruff: noqa: RUF001  (markers of models)

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AddedToken, AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

import penstock
from penstock.engines.vllm.frontend import token_text

pytestmark = pytest.mark.parity("S11", "X8")

CITY, ZONE = '{"city": "Paris", "days": 3}', '{"zone": "CET"}'
_TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}, "zone": {"type": "string"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": _TYPES}}}
    for name in ("get_weather", "get_time")
]


def calls(form: str, between: str = "") -> str:
    return between.join(form % call for call in (("get_weather", CITY), ("get_time", ZONE)))


_JSON, _PARAMETERS = '{"name": "%s", "arguments": %s}', '{"name": "%s", "parameters": %s}'
_TAGS = calls("<tool_call>\n" + _JSON + "\n</tool_call>", "\n")
_LIST = "<tool_calls>[" + calls(_JSON, ", ") + "]</tool_calls>"
_PYTHON = 'get_weather(city="Paris", days=3)%sget_time(zone="CET")'
_PARTS = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
_STEP = '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris</steptml:parameter>'
CALLS = {
    "apertus": f'<|tools_prefix|>[{{"get_weather": {CITY}}}, {{"get_time": {ZONE}}}]<|tools_suffix|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + calls(_PARTS.replace("%s<", "function<", 1).replace("%s", "%s\n```json\n%s\n```"), "\n")
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>" + calls(_PARTS) + "<｜tool▁calls▁end｜>",
    "functiongemma": calls("<start_function_call>call:%s{city:<escape>%s<escape>}<end_function_call>"),
    "gigachat3": "function call<|role_sep|>\n" + _JSON % ("get_weather", CITY),
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "granite-20b-fc": calls("<function_call> " + _JSON, " "),
    "hermes": _TAGS,
    "hunyuan_a13b": _LIST,
    "internlm": f"Ok.<|action_start|><|plugin|>{_PARAMETERS % ('get_weather', CITY)}<|action_end|>",
    "jamba": _LIST,
    "kimi_k2": "<|tool_calls_section_begin|>"
    + calls("<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>[{_PYTHON % ', '}]<|tool_call_end|>",
    "llama3_json": calls(_PARAMETERS, "; "),
    "llama4_json": calls(_PARAMETERS, "; "),
    "longcat": _TAGS.replace("tool_call", "longcat_tool_call"),
    "olmo3": f"<function_calls>{_PYTHON % chr(10)}</function_calls>",
    "pythonic": f"[{_PYTHON % ', '}]",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
    "step3": f"<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>{_STEP}</steptml:invoke>"
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "xlam": f"[{calls(_JSON, ', ')}]",
}
"""Calls in the format of a tool parser. Parsers that are not here read those of other parsers."""
OTHER_CALLS = (_TAGS, f"Ok. {CALLS['xlam']}", CALLS["qwen3_coder"])

_SO = "Let me think of it."
REASONING = {
    "ernie45": f"<think>{_SO}</think>\n<response>\nIt is 4.</response>",
    "granite": f"Here is my thought process: {_SO} Here is my response: It is 4.",
    "hunyuan_a13b": f"<think>\n{_SO}\n</think>\n<answer>\nIt is 4.\n</answer>",
}
OTHER_REASONING = (
    f"<think>\n{_SO}\n</think>\n\nIt is 4.",
    f"Hm<think>{_SO}</think>4",
    f"{_SO}</think>It is 4.",
)
_MARKS = (
    "tool_call /tool_call longcat_tool_call /longcat_tool_call tool_calls /tool_calls "
    "|action_start| |plugin| |action_end| |tool_call_start| |tool_call_end| ｜tool▁calls▁begin｜ "
    "｜tool▁calls▁end｜ ｜tool▁call▁begin｜ ｜tool▁call▁end｜ ｜tool▁sep｜ ｜tool_calls_begin｜ "
    "｜tool_calls_end｜ ｜tool_call_begin｜ ｜tool_call_end｜ ｜tool_sep｜ start_function_call "
    "end_function_call escape |tools_prefix| |tools_suffix| |role_sep| |tool_calls_section_begin| "
    "|tool_calls_section_end| |tool_call_begin| |tool_call_argument_begin| think /think response "
    "/response arg_key /arg_key arg_value /arg_value |begin_of_box| |end_of_box| |python_tag|"
)
REQUEST = ChatCompletionRequest.model_validate(
    {
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "tools": TOOLS,
        "model": "any",
        "stream": True,
    }
)
PROMPT = [1]
OWN_STATE = RequestState.from_new_request
NEVER = ["zz@", '"}@', "It is 5", "</think>@", "@" * 40]
"""Stop strings that begin in the texts and never end there."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    tokenizer.add_tokens([AddedToken(f"<{mark}>", normalized=False) for mark in _MARKS.split()])
    return tokenizer


@pytest.fixture(autouse=True)
def stops(tokenizer: Any) -> Iterator[None]:
    """Holds stop strings as an engine with this reasoning parser does."""
    parsers = SimpleNamespace(reasoning_parser="deepseek_r1")
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="any"))
    token_text.hold_stops(SimpleNamespace(structured_outputs_config=parsers, model_config=model))
    yield
    RequestState.from_new_request = OWN_STATE


class Stream:
    """What the client sees of one output."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._calls: dict[int, list[str]] = {}
        self._reasoning = self._content = ""
        self._reasons: list[Any] = []

    def take(self, text: str, ids: list[int], finish_reason: str | None, stop_reason: Any = None) -> None:
        delta = self._parser.parse_delta(text, ids, REQUEST, PROMPT, finished=finish_reason is not None)
        for call in (delta and delta.tool_calls) or ():
            name, arguments = self._calls.setdefault(call.index, ["", ""])
            self._calls[call.index] = [
                name + (call.function.name or ""),
                arguments + (call.function.arguments or ""),
            ]
        self._reasoning += (delta and delta.reasoning) or ""
        self._content += (delta and delta.content) or ""
        if finish_reason is not None:
            self._reasons = [
                "tool_calls" if self._calls and finish_reason == "stop" else finish_reason,
                stop_reason,
            ]

    @property
    def seen(self) -> list[Any]:
        return [self._calls, self._reasoning, self._content, *self._reasons]


def one_by_one(parser: Any, tokenizer: Any, ids: list[int]) -> list[Any]:
    """What the client sees of single tokens. The last one ends the output, and has no text."""
    stream = Stream(parser)
    for end in range(1, len(ids)):
        text = tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[: end - 1])) :]
        stream.take(text, ids[end - 1 : end], None)
    stream.take("", ids[-1:], "stop")
    return stream.seen


async def outputs(
    tokenizer: Any, ids: list[int], sizes: Iterator[int], reasons: bool = False, **params: Any
) -> AsyncGenerator[Any, None]:
    """vLLM's outputs of these tokens, which come from the core, and are read, in groups of these sizes.

    reasons: whether the request has a reasoning parser.
    """
    given = SamplingParams(output_kind=RequestOutputKind.DELTA, skip_special_tokens=False, **params)
    request = EngineCoreRequest("a", PROMPT, None, given, None, 0.0, None, None, None, external_req_id="a")
    request.reasoning_parser_kwargs = {} if reasons else None
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    processor = OutputProcessor(tokenizer, log_stats=False)
    processor.add_request(request, None, queue=queue)
    begin = 0
    while begin < len(ids) and processor.has_unfinished_requests():
        for _ in range(next(sizes)):  # messages of the core until the stream is read again
            size = next(sizes)
            end = FinishReason.STOP if begin + size >= len(ids) else None
            if begin < len(ids) and processor.has_unfinished_requests():
                processor.process_outputs(
                    [EngineCoreOutput("a", ids[begin : begin + size], finish_reason=end)]
                )
            begin += size
        if (output := queue.get_nowait()) is not None:
            yield output


def joined(parser: Any, tokenizer: Any, ids: list[int], sizes: Iterator[int], **params: Any) -> list[Any]:
    """What the client sees of groups of tokens that a serving stream got, cut again."""

    async def read() -> list[Any]:
        stream, given = Stream(parser), SamplingParams(skip_special_tokens=False)
        found = outputs(tokenizer, ids, sizes, **params)
        if token_text.depends_on_cut(type(parser)):
            found = token_text.single_tokens(found, tokenizer, given)
        async for output in found:
            (one,) = output.outputs
            stream.take(one.text, list(one.token_ids), one.finish_reason, one.stop_reason)
        return stream.seen

    return asyncio.run(read())


def sizes(most: int, seed: int) -> Iterator[int]:
    """Of groups with up to `most` tokens."""
    chosen = random.Random(seed * most)
    while True:
        yield chosen.randint(1, most)


def check(make: Callable[[], Any], tokenizer: Any, text: str, seed: int) -> None:
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    try:
        expected = one_by_one(make(), tokenizer, ids)
    except NotImplementedError:
        pytest.skip("It is a part of another parser.")
    for stop, most in product(([], NEVER), (2, 3, 16, 1000)):
        seen = joined(make(), tokenizer, ids, sizes(most, seed), stop=stop)
        assert seen == expected, (text, stop, most)


def parser_of(tokenizer: Any, tool: str | None, reasoning: str | None) -> Callable[[], Any] | None:
    """Makes parsers of that name, if they work with this tokenizer."""
    try:
        kind: Any = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True, model_name="any")
        kind(tokenizer, REQUEST.tools)
    except Exception:
        return None
    return lambda: kind(tokenizer, REQUEST.tools)


@pytest.mark.parametrize("name", ToolParserManager.list_registered())
def test_joined_tokens_make_the_same_tool_calls(tokenizer: Any, name: str):
    make = parser_of(tokenizer, name, None)
    if make is None:
        pytest.skip("It needs another tokenizer.")
    for text in (CALLS.get(name) and [CALLS[name]]) or OTHER_CALLS:
        check(make, tokenizer, text, seed=len(name))


@pytest.mark.parametrize("name", ReasoningParserManager.list_registered())
def test_joined_tokens_make_the_same_reasoning(tokenizer: Any, name: str):
    make = parser_of(tokenizer, None, name)
    if make is None:
        pytest.skip("It needs another tokenizer.")
    for text in (REASONING[name],) if name in REASONING else OTHER_REASONING:
        check(make, tokenizer, text, seed=len(name))


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
