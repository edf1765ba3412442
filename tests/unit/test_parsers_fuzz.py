"""Answers in the formats of vLLM's tool and reasoning parsers: each client sees the same, however tokens are
joined. No engine runs.

How to use it, and how to replay a failure: docs/inside/testing.md, "Random tests".
"""

# ruff: noqa: RUF001  (markers of models)

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from parsing import REQUEST, Stream, outputs, sizes, stops_held
from transformers import AddedToken, AutoTokenizer
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager

import penstock
from penstock.engines.vllm.frontend import token_text

pytestmark = pytest.mark.parity("S11", "X8")

Call = tuple[str, dict[str, Any]]
Writer = Callable[[str, dict[str, Any]], str]
"""Writes a call of this name with these arguments."""
Form = Callable[[Sequence[Call]], str]


def each(one: Writer, begin: str = "", between: str = "", end: str = "") -> Form:
    return lambda calls: begin + between.join(one(*call) for call in calls) + end


def first(form: Form) -> Form:
    """For formats of a single call."""
    return lambda calls: form(calls[:1])


def plain(value: Any) -> str:
    """As it stands between tags: text without quotes, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(text: str) -> Writer:
    return lambda name, arguments: text % (name, json.dumps(arguments, ensure_ascii=False))


def as_tags(text: str, parameter: str) -> Writer:
    return lambda name, arguments: (
        text % (name, "".join(parameter % (key, plain(value)) for key, value in arguments.items()))
    )


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_dsml(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def as_gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            inner = ",".join(f"{key}:{as_gemma(one)}" for key, one in value.items())
            return f"{{{inner}}}"
        case list():
            return f"[{','.join(map(as_gemma, value))}]"
        case _:
            return json.dumps(value)


_JSON, _PARAMETERS = '{"name": "%s", "arguments": %s}', '{"name": "%s", "parameters": %s}'
_TAGS = each(as_json(f"<tool_call>\n{_JSON}\n</tool_call>"), between="\n")
_TOOLS = each(as_json(_JSON), "<tool_calls>[", ", ", "]</tool_calls>")
_KEYS = as_tags("<tool_call>%s\n%s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n")
_INVOKES = as_tags('<invoke name="%s">\n%s</invoke>\n', '<parameter name="%s">%s</parameter>\n')
_FUNCTIONS = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
_PARAMETER = "<parameter=%s>\n%s\n</parameter>\n"
_PARTS = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
_STEP = as_tags(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%s">%s</steptml:invoke>'
    "<｜tool_call_end｜>",
    '<steptml:parameter name="%s">%s</steptml:parameter>',
)
FORMS: dict[str, Form] = {
    "apertus": each(as_json('{"%s": %s}'), "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "deepseek_v3": each(
        as_json(_PARTS.replace("%s", "function", 1).replace("%s", "%s\n```json\n%s\n```")),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": each(as_json(_PARTS), "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek_v32": each(as_dsml, "<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
    "deepseek_v4": each(as_dsml, "<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"),
    "dots": each(_INVOKES, "<dots_function_call>\n", "", "</dots_function_call>"),
    "ernie45": _TAGS,
    "functiongemma": each(
        lambda name, arguments: (
            f"<start_function_call>call:{name}{{"
            + ",".join(f"{key}:<escape>{plain(value)}<escape>" for key, value in arguments.items())
            + "}<end_function_call>"
        )
    ),
    "gemma4": each(lambda name, arguments: f"<|tool_call>call:{name}{as_gemma(arguments)}<tool_call|>"),
    "gigachat3": first(each(as_json(_JSON), "function call<|role_sep|>\n")),
    "glm45": each(_KEYS),
    "glm47": each(_KEYS),
    "granite-20b-fc": each(as_json(f"<function_call> {_JSON}"), between=" "),
    "granite4": _TAGS,
    "hermes": _TAGS,
    "hunyuan_a13b": _TOOLS,
    "internlm": first(each(as_json(_PARAMETERS), "<|action_start|><|plugin|>", "", "<|action_end|>")),
    "jamba": _TOOLS,
    "kimi_k2": each(
        as_json("<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>"),
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "lfm2": each(as_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "llama3_json": each(as_json(_PARAMETERS), between="; "),
    "llama4_json": each(as_json(_PARAMETERS), between="; "),
    "llama4_pythonic": each(as_python, "[", ", ", "]"),
    "longcat": each(
        as_json(f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>"),
        between="\n",
    ),
    "mimo": each(as_tags(_FUNCTIONS, _PARAMETER), between="\n"),
    "minimax_m2": each(_INVOKES, "<minimax:tool_call>", "", "</minimax:tool_call>"),
    "olmo3": each(as_python, "<function_calls>", "\n", "</function_calls>"),
    "phi4_mini_json": each(as_json(_JSON), "functools[", ", ", "]"),
    "poolside_v1": each(_KEYS),
    "pythonic": each(as_python, "[", ", ", "]"),
    "qwen3_coder": each(as_tags(_FUNCTIONS, _PARAMETER), between="\n"),
    "qwen3_xml": each(as_tags(_FUNCTIONS, _PARAMETER), between="\n"),
    "seed_oss": each(
        as_tags(_FUNCTIONS.replace("tool_call", "seed:tool_call"), _PARAMETER),
        between="\n",
    ),
    "step3": each(_STEP, "<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>"),
    "step3p5": each(as_tags(_FUNCTIONS, _PARAMETER), between="\n"),
    "xlam": each(as_json(_JSON), "[", ", ", "]"),
}
"""How a tool parser's models write their calls. Parsers that are not here get the formats of `OTHERS`."""
OTHERS = (_TAGS, FORMS["xlam"], FORMS["qwen3_coder"])

REASONING = {
    "ernie45": "<think>%s</think>\n<response>\n%s</response>",
    "granite": "Here is my thought process: %s Here is my response: %s",
    "hunyuan_a13b": "<think>\n%s\n</think>\n<answer>\n%s\n</answer>",
    "gemma4": "<|channel>thought\n%s<channel|>%s",
    "seed_oss": "<seed:think>%s</seed:think>%s",
    "mistral": "[THINK]%s[/THINK]%s",
}
OTHER_REASONING = ("<think>\n%s\n</think>\n\n%s", "Hm<think>%s</think>%s", "%s</think>%s")

MARKS = (
    "tool_call /tool_call longcat_tool_call /longcat_tool_call tool_calls /tool_calls "
    "|action_start| |plugin| |action_end| |tool_call_start| |tool_call_end| ｜tool▁calls▁begin｜ "
    "｜tool▁calls▁end｜ ｜tool▁call▁begin｜ ｜tool▁call▁end｜ ｜tool▁sep｜ ｜tool_calls_begin｜ "
    "｜tool_calls_end｜ ｜tool_call_begin｜ ｜tool_call_end｜ ｜tool_sep｜ start_function_call "
    "end_function_call escape |tools_prefix| |tools_suffix| |role_sep| |tool_calls_section_begin| "
    "|tool_calls_section_end| |tool_call_begin| |tool_call_argument_begin| think /think response "
    "/response arg_key /arg_key arg_value /arg_value |begin_of_box| |end_of_box| |python_tag| "
    "|tool_call tool_call| |channel channel| minimax:tool_call /minimax:tool_call seed:tool_call "
    "/seed:tool_call seed:think /seed:think dots_function_call /dots_function_call"
)
"""What the models' tokenizers have as one token, between `<` and `>`."""

NEVER = ["zz@", '"}@', "It is 5@", "</think>@", "@" * 40]
"""Stop strings that begin in the texts and never end there."""

WORDS = st.text(st.sampled_from("abz 5.,:'\"\\/{}[]()=<>&\n\té中🙂"), max_size=12)
VALUES = {
    "city": WORDS,
    "days": st.integers(-9, 1000),
    "tags": st.lists(WORDS, max_size=2),
    "place": st.dictionaries(
        st.sampled_from(["at", "in"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(0, 9) | WORDS,
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("x"), inner),
            max_leaves=3,
        ),
    ),
}
CALLS = st.lists(
    st.tuples(st.sampled_from(["get_weather", "get_time"]), st.fixed_dictionaries({}, optional=VALUES)),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    tokenizer.add_tokens([AddedToken(f"<{mark}>", normalized=False) for mark in MARKS.split()])
    tokenizer.add_tokens([AddedToken(f"[{mark}]", normalized=False) for mark in ("THINK", "/THINK")])
    return tokenizer


@pytest.fixture(autouse=True)
def stops() -> Iterator[None]:
    with stops_held():
        yield


def parser_of(tokenizer: Any, tool: str | None, reasoning: str | None) -> Callable[[], Any]:
    try:
        kind: Any = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True, model_name="any")
        kind(tokenizer, REQUEST.tools)
    except Exception as error:
        pytest.skip(f"It needs another tokenizer: {error}")
    return lambda: kind(tokenizer, REQUEST.tools)


def seen(parser: Any, tokenizer: Any, ids: list[int], most: int, seed: int, stop: Sequence[str] = ()) -> Any:
    """What the client sees of groups of up to `most` tokens, cut again where the parser needs it."""

    async def read() -> Any:
        stream, params = Stream(parser), SamplingParams(skip_special_tokens=False)
        found = outputs(tokenizer, ids, sizes(most, seed), stop=list(stop))
        if token_text.depends_on_cut(type(parser)):
            found = token_text.single_tokens(found, tokenizer, params)
        async for output in found:
            (one,) = output.outputs
            stream.take(one.text, list(one.token_ids), one.finish_reason, one.stop_reason)
        return stream.seen

    return asyncio.run(read())


def check(make: Callable[[], Any], tokenizer: Any, text: str, seed: int) -> Any:
    """What a client sees of single tokens, which is what it sees of all groups."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    try:
        expected = seen(make(), tokenizer, ids, 1, seed)
    except NotImplementedError:
        pytest.skip("It is a part of another parser.")
    for stop, most in product(((), NEVER), (2, 3, 16, 1000)):
        found = seen(make(), tokenizer, ids, most, seed, stop)
        assert without_spaces(found) == without_spaces(expected), (text, stop, most)
    return expected


def without_spaces(seen: Any) -> Any:
    """vLLM's parsers that take any groups drop space between calls, but not where text joins it."""
    calls, reasoning, content, *rest = seen
    return calls, reasoning, "".join(content.split()), *rest


def whole(parser: Any, tokenizer: Any, text: str) -> Any:
    """Calls and reasoning of an answer that is not streamed."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    reasoning, _, calls = parser.parse(text, REQUEST, enable_auto_tools=True, model_output_token_ids=ids)
    return [(call.name, value_of(call.arguments)) for call in calls or ()], reasoning or ""


def value_of(arguments: str) -> Any:
    """Streams write JSON with other spaces, and of some parsers no arguments as no text."""
    return json.loads(arguments or "{}")


_ANYWHERE = "its stream finds calls only where the answer begins with them"
_AT_END = "its answer that is not streamed has no calls where text follows them"
STREAMED_OTHERWISE = {
    "functiongemma": "a stream of several arguments is no JSON",
    "gigachat3": _AT_END,
    "granite-20b-fc": _ANYWHERE,
    "hunyuan_a13b": _ANYWHERE,
    "jamba": "a stream leaves some arguments out",
    "llama3_json": _ANYWHERE,
    "llama4_json": _ANYWHERE,
    "llama4_pythonic": _AT_END,
    "olmo3": _ANYWHERE,
    "phi4_mini_json": "it reads no streams",
    "pythonic": _AT_END,
    "xlam": _AT_END,
}
"""Tool parsers whose streams say another thing than their whole answers, token by token: vLLM's own."""
REASONS_OTHERWISE = {
    "deepseek_r1": "text before <think> counts only in a stream",
    "gemma4": "its stream wants a prompt that begins the channel",
    "granite": "its stream keeps the words that begin the answer",
    "hunyuan_a13b": "its stream loses some reasoning",
    "holo2": "text before <think> counts only in a stream",
    "hy_v4": "text before <think> counts only in a stream",
    "kimi_k3": "its stream never sends a last <",
}

EXAMPLES = max(5, settings().max_examples // 10)
SEEDS = st.integers(0, 9)


@pytest.mark.parametrize("name", ToolParserManager.list_registered())
def test_tool_calls_are_the_same_however_they_are_cut(tokenizer: Any, name: str):
    make = parser_of(tokenizer, name, None)
    forms = [FORMS[name]] if name in FORMS else OTHERS

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(forms), CALLS, WORDS, WORDS, SEEDS)
    def draw(form: Form, calls: list[Call], before: str, after: str, seed: int) -> None:
        text = before + form(calls) + after
        found, reasoning, *_ = check(make, tokenizer, text, seed)
        event(f"{len(found)} of {len(calls)} calls")
        if name not in STREAMED_OTHERWISE:
            streamed = [(called, value_of(arguments)) for called, arguments in found.values()]
            assert (streamed, reasoning) == whole(make(), tokenizer, text), text

    draw()


@pytest.mark.parametrize("name", ReasoningParserManager.list_registered())
def test_reasoning_is_the_same_however_it_is_cut(tokenizer: Any, name: str):
    if name == "openai_gptoss":
        pytest.skip("It only finds where an answer begins.")
    make = parser_of(tokenizer, None, name)
    forms = [REASONING[name]] if name in REASONING else OTHER_REASONING

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(forms), WORDS, WORDS, SEEDS)
    def draw(form: str, reasoning: str, answer: str, seed: int) -> None:
        text = form % (reasoning, answer)
        streamed = check(make, tokenizer, text, seed)
        if name not in REASONS_OTHERWISE:
            assert streamed[1] == whole(make(), tokenizer, text)[1], text

    draw()
