"""The request bodies of the simulator: the fields of OpenAI's and vLLM's requests that change its response,
and prompts as its model sees them.

A field that is null is not set. Those that would give an answer a form which the simulator does not have are
refused; all others (temperature, top_p, ...) are ignored, as they would change the text of an answer only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from penstock.engine import Prompt
from penstock.engines.sim import tokenizer
from penstock.engines.sim.tools import (
    Function,
    Named,
    ResponseFormat,
    Structured,
    Tool,
    forced,
    structured,
)
from penstock.errors import BadRequest
from penstock.openai import requests
from penstock.openai.errors import unreadable
from penstock.openai.parameters import SAMPLING

T = TypeVar("T")
Positive = Annotated[int, Meta(ge=1)]


class Part(Struct):
    """A part of a message's content; only text adds to the prompt. content: the result of a tool."""

    type: str
    text: str | None = None
    content: str | list[Part] | None = None


Content = str | list[Part] | None


class ChatMessage(Struct):
    """One message of a chat."""

    role: str
    content: Content = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class Params(Struct, kw_only=True):
    """Sampling parameters that the simulator obeys."""

    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: Structured | None = None

    def stops(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in stop if word]


class StreamOptions(Struct):
    include_usage: bool | None = None


class Generate(Params, kw_only=True):
    """Fields that all requests for text share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    def structured(self) -> Structured | None:
        """The form that is set for the answer. Raises: BadRequest."""
        return structured(self.response_format) or self.structured_outputs

    def called(self) -> Function | None:
        """The function that must be called. Raises: BadRequest."""
        return None

    def sampling(self) -> dict[str, Any]:
        """Parameters for `generate`. Raises: BadRequest."""
        given = {name: getattr(self, name) for name in Params.__struct_fields__}
        return given | {"structured_outputs": self.structured()}


class Chat(Generate, kw_only=True):
    messages: Messages
    max_completion_tokens: Positive | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Named | None = None

    def __post_init__(self) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens

    def asked(self) -> Prompt:
        return {"messages": self.messages}

    def called(self) -> Function | None:
        return forced(self.tools or [], self.tool_choice)

    def structured(self) -> Structured | None:
        function = self.called()
        return super().structured() if function is None else Structured(json=function.schema())


class Completion(Generate, kw_only=True):
    prompt: str | list[str | int | list[int]]

    def __post_init__(self) -> None:
        self.max_tokens = self.max_tokens or 16  # OpenAI's default

    def asked(self) -> Prompt:
        """Raises: BadRequest."""
        prompts = several(self.prompt, "prompt")
        return prompts[0] if len(prompts) == 1 else {"prompts": prompts}


class Tokenize(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class Detokenize(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Embed(Struct, kw_only=True):
    """input: a text, a list of texts, or the same as token ids."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Score(Struct, kw_only=True):
    """One text to compare with each of several, or two lists of texts to compare in pairs."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        """Raises: BadRequest when the two lists differ in length."""
        left = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        right = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise BadRequest("`text_1` must hold one text, or as many as `text_2`.", param="text_1")
        return list(zip(left, right, strict=True))


def several(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts in a text, a list of texts, token ids, or lists of these. Raises: BadRequest."""
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    prompts = [one for one in given if not isinstance(one, int)]
    if not given or (ids and prompts) or [] in prompts:
        raise BadRequest(f"`{param}` must hold texts, token ids, or lists of token ids.", param=param)
    return [ids] if ids else prompts


def read(path: str, body: bytes, kind: type[T]) -> T:
    """The body of a request to `path`. Raises: BadRequest that names the field at fault."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(error) from error
    given = requests.prepared(path, given, nulls=b"null" in body)
    requests.refuse_not_done(path, given)
    _refuse(given)
    return convert(given, kind)


def sampling(params: Mapping[str, Any]) -> Params:
    """Parameters of `generate`, by vLLM's names. Raises: BadRequest that names the one at fault."""
    if unknown := [name for name in params if name not in _SAMPLING]:
        raise BadRequest(f"'{unknown[0]}' is no sampling parameter of vLLM.", param=unknown[0])
    _refuse(params)
    return convert(params, Params)


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises: BadRequest for a field that is set and would give the answer another form."""
    for name in _NOT_SIMULATED:
        if (value := given.get(name)) is not None and value is not False:
            raise BadRequest(f"The simulator has no `{name}`.", param=name)
    if "message.output_text.logprobs" in str(given.get("include")):
        raise BadRequest("The simulator has no logprobs.", param="include")


_NOT_SIMULATED = (
    *("logprobs", "prompt_logprobs", "use_beam_search", "echo", "suffix"),
    *("background", "previous_response_id", "previous_input_messages", "enable_response_messages"),
)

_SAMPLING = {*SAMPLING, "detokenize", "extra_args", "flat_logprobs", "skip_reading_prefix_cache"} - {
    *("max_completion_tokens", "response_format", "top_logprobs", "truncate_prompt_tokens", "vllm_xargs"),
    *("add_special_tokens", "cache_salt", "length_penalty", "priority", "truncation_side", "use_beam_search"),
}
"""Those of vLLM's SamplingParams that users set."""


def convert(params: Any, kind: type[T]) -> T:
    """Raises: BadRequest that names the field at fault."""
    try:
        return msgspec.convert(params, type=kind)
    except msgspec.ValidationError as error:
        raise unreadable(error) from error


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as the model sees it. said: the text that an echo repeats."""

    token_ids: Sequence[int]
    said: str


def each(asked: Prompt) -> Sequence[Prompt]:
    """The prompts of a dict with `prompts`, or the one prompt that it is."""
    return asked["prompts"] if isinstance(asked, Mapping) and "prompts" in asked else [asked]


def read_prompt(prompt: Prompt) -> Tokens:
    """Text, token ids, or a dict with `prompt`, `prompt_token_ids` or `messages`. Raises: BadRequest."""
    if isinstance(prompt, str):
        return Tokens(tokenizer.encode(prompt), prompt)
    if not isinstance(prompt, Mapping):
        token_ids = convert(prompt, list[int])
        return Tokens(token_ids, tokenizer.decode(token_ids))
    if "messages" in prompt:
        return chat(convert(prompt, Chat).messages)
    for key in ("prompt_token_ids", "prompt"):
        if isinstance(inner := prompt.get(key), str | list):
            return read_prompt(cast("str | list[int]", inner))
    raise BadRequest("A prompt must be text, token ids, or hold `prompt`, `prompt_token_ids` or `messages`.")


def chat(messages: Sequence[ChatMessage]) -> Tokens:
    """The simulator's chat template: one line per message. An echo repeats the last message."""
    text = "".join(f"{message.role}: {message.text()}\n" for message in messages)
    return Tokens(tokenizer.encode(text + "assistant:"), messages[-1].text())
