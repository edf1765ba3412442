"""Requests drawn from a server's own OpenAPI document: every endpoint, every field of it, and odd bodies.

A right request of each endpoint is written down; to it come fields with values of their types, sometimes of
others. Small values, so that each is answered in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

Json = Any

TEXTS = ("What is 2 + 3?", "Hello!", "Tell me the weather in Paris.", "Ünïcode 🙂 日本", "")
LAST = "{last}"
"""In a path or a body: the id of the response that was made last."""


def user(text: str) -> Json:
    return [{"role": "user", "content": text}]


def tool(name: str, argument: str = "city", **more: Json) -> Json:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def flat(tool: Json) -> Json:
    """As Responses have it."""
    return {"type": "function", **tool["function"]}


CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
WEATHER = tool("get_weather")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
ASKED = [
    *user("What is the weather in Paris?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-0", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call-0", "content": "sunny"},
]
ITEMS = [
    *user("What is the weather in Paris?"),
    {"type": "function_call", "call_id": "call-0", **CALL},
    {"type": "function_call_output", "call_id": "call-0", "output": "sunny"},
]
ANTHROPIC_TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
CHAT: Json = {"messages": user(TEXTS[0]), "max_tokens": 24, "temperature": 0}
RESPONSE: Json = {"input": TEXTS[0], "max_output_tokens": 24, "temperature": 0}
MESSAGE: Json = {"model": "m", "messages": user(TEXTS[0]), "max_tokens": 24, "temperature": 0}
COMPLETION: Json = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}

RIGHT: dict[str, list[Json]] = {
    "/v1/chat/completions": [
        CHAT,
        CHAT | {"stream": True},
        CHAT | {"messages": user("What is the weather in Paris?"), "tools": [WEATHER], "max_tokens": 48},
        CHAT | {"messages": ASKED, "tools": [WEATHER], "stream": True},
        CHAT | {"temperature": 1.5, "seed": 7, "logprobs": True, "top_logprobs": 2},
        CHAT | {"messages": user("Hello!"), "response_format": FORMAT},
    ],
    "/v1/chat/completions/batch": [CHAT | {"messages": [user(TEXTS[0]), user("Hello!")]}],
    "/v1/completions": [
        COMPLETION,
        COMPLETION | {"stream": True},
        COMPLETION | {"prompt": ["Hello", "What"], "temperature": 1.5, "seed": 7, "logprobs": 2},
    ],
    "/v1/responses": [
        RESPONSE,
        RESPONSE | {"stream": True},
        RESPONSE | {"input": user("What is the weather in Paris?"), "tools": [flat(WEATHER)]},
        RESPONSE | {"input": ITEMS, "tools": [flat(WEATHER)], "stream": True},
    ],
    "/v1/messages": [
        MESSAGE,
        MESSAGE | {"stream": True, "system": "Be short."},
        MESSAGE | {"messages": user("What is the weather in Paris?"), "tools": [ANTHROPIC_TOOL]},
    ],
    "/v1/messages/count_tokens": [{"model": "m", "messages": user(TEXTS[0])}],
    "/tokenize": [{"prompt": "Hello"}, {"messages": user(TEXTS[0])}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/systemone": [{"state": "It rains.", "questions": {"wet": {"type": "boolean"}}}],
    "/generative_scoring": [{"query": "Is it wet?", "items": ["rain", "sun"], "label_token_ids": [5, 6]}],
    "/v1/embeddings": [{"input": "the soup tastes salty"}, {"input": ["a", "b c"]}, {"messages": user("a")}],
    "/v2/embed": [{"texts": ["the soup"], "input_type": "search_query"}],
    "/pooling": [{"input": "the soup"}, {"messages": user("the soup")}],
    "/classify": [{"input": "the soup"}],
    "/score": [{"text_1": "the soup", "text_2": ["salt", "a train"]}],
    "/v1/score": [{"queries": "the soup", "documents": ["salt", "a train"]}],
    "/rerank": [{"query": "the soup", "documents": ["salt", "a train"]}],
    "/v1/rerank": [{"query": "the soup", "documents": ["salt", "a train"], "top_n": 1}],
    "/v2/rerank": [{"query": "the soup", "documents": ["salt", "a train"]}],
}
GETS = ("/v1/models/m", "/v1/responses/unknown", f"/v1/responses/{LAST}?stream=true&starting_after=1")
"""Beside those that the document lists."""

_VALUES: dict[str, list[Json]] = {
    "add_generation_prompt": [False],
    "allowed_token_ids": [[5, 6, 7], [], [99999]],
    "bad_words": [["the"], [""]],
    "cache_salt": ["x"],
    "chat_template": ["{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"x": 1}],
    "documents": [[{"title": "a", "text": "b"}]],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], []],
    "input": [*TEXTS, user("Hello!"), ITEMS, [], [5, 6], [[5], [6]]],
    "instructions": ["Be short."],
    "items": [["yes", "no"]],
    "label_token_ids": [[5, 6]],
    "logit_bias": [{"5": 50}, {"5": -100, "6": 1.5}, {"x": 1}, {"99999": 1}, {}],
    "logprob_token_ids": [[5, 6]],
    "max_completion_tokens": [0, 1, 30, 1000, -1],
    "max_output_tokens": [0, 1, 30, 1000, -1],
    "max_tokens": [0, 1, 30, 1000, -1],
    "metadata": [{"a": "b"}, {}],
    "min_tokens": [0, 3, 100],
    "model": ["m", "", "other", "m:x"],
    "n": [1, 2, 3, 0],
    "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "low"}],
    "previous_response_id": [LAST, "resp_unknown", "unknown"],
    "prompt": [*TEXTS, [5, 6, 7], ["Hello", "What"], [[5], [6, 7]], [], {"id": "x"}],
    "reasoning": [{"effort": "low"}, {"effort": "none"}, {"summary": "auto"}],
    "repetition_detection": [{"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}],
    "request_id": ["request-1"],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        FORMAT,
        {"type": "json_schema"},
        {"type": "x"},
    ],
    "seed": [1, -5, 2**40],
    "stop": ["5", ["plus", "."], [], "zzz", ["</think>"]],
    "stop_sequences": [["plus"], ["zzzz"], []],
    "stop_token_ids": [[5, 6], [], [99999]],
    "stream_interval": [1, 3],
    "structured_outputs": [
        *({"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"}, {"json": SCHEMA}, {"json_object": True}),
        *({"grammar": 'root ::= "a"'}, {"regex": "("}, {"choice": []}, {"json": {"type": "nothing"}}, {}),
    ],
    "system": ["Be short.", [{"type": "text", "text": "Be short."}]],
    "temperature": [0, 0.5, 1.5, -1],
    "text": [
        {"format": {"type": "text"}},
        {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    ],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}],
    "thinking_token_budget": [0, 3],
    "tokens": [[], [5, 6], [99999], [-1]],
    "top_k": [0, 1, 5, -1, -5],
    "top_logprobs": [0, 1, 5, 50],
    "truncate_prompt_tokens": [-1, 0, 3, 1000],
    "vllm_xargs": [{"a": 1}],
}
_TOOLS = {
    "/v1/responses": (
        [[flat(WEATHER)], [], [{"type": "web_search"}], [{"type": "custom", "name": "x"}]],
        ["auto", "none", "required", {"type": "function", "name": "get_weather"}],
    ),
    "/v1/messages": (
        [[ANTHROPIC_TOOL], [], [{"type": "web_search_20250305", "name": "web_search"}]],
        [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "get_weather"}],
    ),
    "": (
        [[WEATHER], [], [WEATHER, tool("get_time", strict=True)]],
        ["auto", "none", "required", {"type": "function", "function": {"name": "get_weather"}}],
    ),
}
_PART = {"type": "text", "text": "Hello!"}
_MESSAGES = [
    *(user(text) for text in TEXTS),
    *(ASKED, [], user("x " * 700), [{"role": "user", "content": None}], [{"role": "robot", "content": "a"}]),
    *([{"role": "user", "content": [_PART, _PART]}], [{"role": "user", "content": [{"type": "x"}]}]),
    [{"role": "system", "content": "Be short."}, *user("Hello!")],
    [*user("Hello!"), {"role": "assistant", "content": [_PART, {"type": "refusal", "refusal": "no"}]}],
    [*user("Hello!"), {"role": "assistant", "content": "Hello", "reasoning": "I say hello."}, *user("So?")],
]
_NOT_IN_VLLMS = {
    "/v1/chat/completions": {
        "functions": [[WEATHER["function"]]],
        "function_call": ["auto", {"name": "get_weather"}],
        "web_search_options": [{}, {"search_context_size": "low"}],
        "audio": [{"voice": "a", "format": "mp3"}],
        "modalities": [["text"], ["text", "audio"]],
        "store": [True],
        "service_tier": ["auto", "flex", "x"],
        "verbosity": ["low"],
    },
    "/v1/responses": {
        "conversation": ["conv_1"],
        "context_management": [[{"type": "compaction"}]],
        "safety_identifier": ["x"],
    },
    "/v1/messages": {
        "container": ["x"],
        "mcp_servers": [[], [{"type": "url", "url": "http://x", "name": "x"}]],
    },
}
"""Fields of OpenAI's and Anthropic's that vLLM's document does not have."""

_ODD: list[Json] = [
    *(None, True, 0, -1, 1, 2**63, 0.5, 1e308, "", "x", "1", "auto", "🙂", "\0"),
    *([], [None], [0], ["x"], [[]], [{}], {}, {"x": None}, {"type": "x"}, {"type": "object"}),
]


@dataclass(frozen=True)
class Request:
    """fields: of the JSON body. content: a text in place of it. kind: its content type."""

    path: str
    fields: Mapping[str, Json] | None = None
    method: str = "POST"
    content: str | None = None
    encoding: str = "utf-8"
    kind: str = "application/json"

    def body(self, last: str) -> bytes | None:
        """last: in the place of `LAST`."""
        if self.content is None and self.fields is None:
            return None
        text = json.dumps(self.fields).replace(LAST, last) if self.content is None else self.content
        return text.encode(self.encoding)

    def without(self, name: str) -> Request:
        """Without this field."""
        return replace(self, fields={key: value for key, value in (self.fields or {}).items() if key != name})

    def text(self) -> str:
        """To send it again."""
        return json.dumps(
            {key: value for key, value in vars(self).items() if value != vars(Request).get(key)}
        )

    @classmethod
    def of(cls, text: str) -> Request:
        return cls(**json.loads(text))


COMPLETIONS = "/v1/completions"
_CUT = json.dumps(COMPLETION)[:-1]
ODD_BODIES = [
    *(Request(COMPLETIONS, content=content) for content in (_CUT, "[]", "1", "", "{}", "null", "x")),
    *(Request(COMPLETIONS, COMPLETION, encoding=encoding) for encoding in ("utf-8-sig", "utf-16")),
    Request(COMPLETIONS, content='"\xff"', encoding="latin-1"),
    *(
        Request(COMPLETIONS, COMPLETION, kind=kind)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8")
    ),
    *(Request(COMPLETIONS, method=method) for method in ("GET", "DELETE")),
    *(Request(path) for path in ("/v1/nothing", "/v1/models")),
]


class Drawer:
    """Draws from `document`; the same requests from the same `random`."""

    def __init__(self, document: Json, random: Random) -> None:
        self._schemas = document["components"]["schemas"]
        self._random = random
        self.fields: dict[str, dict[str, Json]] = {}
        """Of each endpoint that is posted to: its fields, with their schemas."""
        self.gets: list[str] = []
        for name, methods in document["paths"].items():
            path = name.replace("{response_id}", LAST)
            if "get" in methods:
                self.gets.append(path)
            if "post" in methods:
                content = methods["post"].get("requestBody", {}).get("content", {})
                self.fields[path] = self._fields(content.get("application/json", {}).get("schema", {}))

    def _fields(self, schema: Json) -> dict[str, Json]:
        schema = self._resolved(schema)
        found = dict(schema.get("properties", {}))
        for way in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(way, ()):
                found |= self._fields(one)
        return found

    def _resolved(self, schema: Json) -> Json:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def requests(self) -> Iterator[Request]:
        """Without end: first each field of each endpoint by itself, then several at a time."""
        for path in self.fields:
            yield from (Request(path, one) for one in RIGHT.get(path, [{}]))
        yield from (Request(path, method="GET") for path in [*self.gets, *GETS])
        yield from (one for one in ODD_BODIES if COMPLETIONS in self.fields)
        for turn in count():
            every = [(path, name) for path in self.fields for name in self._names(path)]
            self._random.shuffle(every)
            for path, name in every:
                fields = deepcopy(self._random.choice(RIGHT.get(path, [{}])))
                for one in (name, *self._random.sample(self._names(path), min(turn, 2))):
                    fields[one] = self._value(path, one)
                if self._random.random() < 0.3 and "stream" in self.fields[path]:
                    fields["stream"] = True
                yield Request(path, _repeatable(fields, self.fields[path]))

    def _names(self, path: str) -> list[str]:
        return [*self.fields[path], *_NOT_IN_VLLMS.get(path, ())]

    def _value(self, path: str, name: str) -> Json:
        if self._random.random() < 0.15:
            return deepcopy(self._random.choice(_ODD))
        tools, choices = _TOOLS.get(path, _TOOLS[""])
        known = {"tools": tools, "tool_choice": choices, "messages": _MESSAGES, **_NOT_IN_VLLMS.get(path, {})}
        values = known.get(name) or _VALUES.get(name)
        if name == "messages" and path.endswith("/batch"):
            values = [[one, user("Hello!")] for one in _MESSAGES]
        if values:
            return deepcopy(self._random.choice(values))
        return self._of(self.fields[path].get(name, {}), 3)

    def _of(self, schema: Json, depth: int) -> Json:
        """A value of this schema."""
        schema, draw = self._resolved(schema), self._random
        for way in ("anyOf", "oneOf", "allOf"):
            if way in schema:
                return self._of(draw.choice(schema[way]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        low, high = schema.get("minimum", -2), schema.get("maximum", 4)
        match schema.get("type"):
            case "boolean":
                return draw.random() < 0.5
            case "integer":
                return draw.randint(int(max(low, -2)), int(min(high, 4)))
            case "number":
                return draw.choice([0, 1, 2, 0.5, -0.5, 1.5])
            case "string":
                return draw.choice(["x", "a b", "1", "🙂"])
            case "null":
                return None
            case "array":
                return [
                    self._of(schema.get("items", {}), depth - 1)
                    for _ in range(draw.randrange(3) * (depth > 0))
                ]
            case _:
                needed = {*schema.get("required", ())}
                return {
                    name: self._of(one, depth - 1)
                    for name, one in schema.get("properties", {}).items()
                    if name in needed or (depth > 0 and draw.random() < 0.2)
                }


def _repeatable(fields: Json, known: Mapping[str, Json]) -> Json:
    """Greedy, or with a seed; some endpoints have no seed, and beam search does not heed it."""
    temperature = fields.get("temperature")
    by_chance = temperature is None or (isinstance(temperature, int | float) and temperature > 0)
    if "temperature" not in known or not by_chance:
        return fields
    if "seed" in known and fields.get("seed", 11) is not None and not fields.get("use_beam_search"):
        return {"seed": 11} | fields
    return fields | {"temperature": 0}
