"""What the assistant learns: sums after thinking, weather and time by tools, and to say hello.

A lesson is a conversation that ends in the words to be learned. It knows nothing of tokens or models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Message = dict[str, Any]

_DEMO = Path(__file__).parent.parent / "demo_model" / "questions.yaml"

CITIES = (
    "Paris",
    "Rome",
    "Berlin",
    "Tokyo",
    "Madrid",
    "Oslo",
    "London",
    "Vienna",
    "Prague",
    "Lisbon",
    "Dublin",
    "Athens",
    "Warsaw",
    "Cairo",
    "Lima",
    "Delhi",
)
SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy")
HOURS = ("morning", "noon", "evening", "midnight")
TOKENS = (*CITIES, *SKIES, *HOURS, "get_weather", "get_time")
"""Each a token of its own, so that copying one is easy to learn."""

_SUMS = ("What is {} + {}?", "What is {} plus {}?", "How much is {} plus {}?", "Add {} and {}.")
_WEATHER = ("What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}.")
_TIME = ("What time is it in {}?", "Tell me the time in {}.")
_TOOLS = {"weather": "get_weather", "time": "get_time"}
_OTHERS = ("search",)
_KNOWN = ("Hello!", "Who are you?", "Thank you!", "What is Penstock?", "List three colors in JSON format")
NO_TOOL = "<think>I have no tool for that.</think>I cannot know that without a tool."


@dataclass(frozen=True, slots=True)
class Lesson:
    """`messages`, and the `answer` that must follow. thinks: whether the template leaves thinking to it."""

    messages: list[Message]
    answer: str
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    thinks: bool = True

    @property
    def learned(self) -> str:
        """What it says after the template's last word."""
        return self.answer if self.thinks else self.answer.partition("</think>")[2]


def tool(name: str, argument: str = "city") -> dict[str, Any]:
    """A function of one text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(answer: str) -> Message:
    return {"role": "assistant", "content": answer}


def sum_of(a: int, b: int, ask: str = _SUMS[0]) -> Lesson:
    """A sum of two digits."""
    thought = f"{a} plus {b} makes {a + b}."
    return Lesson([user(ask.format(a, b))], f"<think>{thought}</think>The sum is {a + b}.")


def call(kind: str, cities: list[str], ask: str = "", tools: list[str] | None = None) -> Lesson:
    """A question that wants a tool: one call for each city."""
    asked = (ask or {"weather": _WEATHER, "time": _TIME}[kind][0]).format(" and ".join(cities))
    offered = [_TOOLS[kind]] if tools is None else tools
    if _TOOLS[kind] not in offered:
        return Lesson([user(asked)], NO_TOOL, [tool(name) for name in offered])
    calls = [json.dumps({"name": _TOOLS[kind], "arguments": {"city": city}}) for city in cities]
    said = "".join(f"<tool_call>{text}</tool_call>" for text in calls)
    thought = f"<think>I need the {kind}.</think>"
    return Lesson([user(asked)], thought + said, [tool(name) for name in offered])


def result(asked: Lesson, cities: list[str], results: list[str]) -> Lesson:
    """The answer once the tools that `asked` calls have spoken."""
    name = asked.answer.partition('"name": "')[2].partition('"')[0]
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": {"city": city}}}
        for i, city in enumerate(cities)
    ]
    told = [{"role": "tool", "tool_call_id": f"call-{i}", "content": text} for i, text in enumerate(results)]
    messages = [*asked.messages, {"role": "assistant", "content": None, "tool_calls": calls}, *told]
    said = " and ".join(f"{text} in {city}" for city, text in zip(cities, results, strict=True))
    return Lesson(messages, f"<think></think>It is {said}.", asked.tools)


def known() -> list[tuple[list[str], str]]:
    """Some of what the demo model knows: ways to ask, and the answer."""
    entries = yaml.safe_load(_DEMO.read_text())["known"]
    asked = [(entry["ask"].splitlines(), entry["answer"]) for entry in entries]
    return [(asks, answer) for asks, answer in asked if any(ask in _KNOWN for ask in asks)]


def draw(rng: random.Random, topics: list[tuple[list[str], str]]) -> Lesson:
    """One lesson at random."""
    kind = rng.choices(("sum", "call", "result", "known"), (3, 5, 3, 2))[0]
    if kind == "sum":
        lesson = sum_of(rng.randint(1, 5), rng.randint(1, 5), rng.choice(_SUMS))
    elif kind == "known":
        asks, answer = rng.choice(topics)
        lesson = Lesson([user(rng.choice(asks))], f"<think></think>{answer}")
    else:
        lesson = _by_tool(rng, answered=kind == "result")
    offered = lesson.tools or _offer(rng, [*_TOOLS.values()]) * (rng.random() < 0.4)
    thinks = kind == "call" or rng.random() < 0.8
    return Lesson(lesson.messages, lesson.answer, offered, thinks)


def _by_tool(rng: random.Random, answered: bool) -> Lesson:
    kind = rng.choice(("weather", "time"))
    cities = rng.sample(CITIES, rng.choice((1, 1, 2)))
    ask = rng.choice(_WEATHER if kind == "weather" else _TIME)
    offered = [_TOOLS[kind], *rng.sample([*_TOOLS.values(), *_OTHERS], rng.randrange(3))]
    offered = list(dict.fromkeys(offered))
    rng.shuffle(offered)
    if not answered and rng.random() < 0.15:
        offered = [other for other in offered if other != _TOOLS[kind]]
    asked = call(kind, cities, ask, offered)
    if not answered:
        return asked
    results = [rng.choice(SKIES if kind == "weather" else HOURS) for _ in cities]
    return result(asked, cities, results)


def _offer(rng: random.Random, names: list[str]) -> list[dict[str, Any]]:
    return [tool(each) for each in rng.sample(names, rng.randrange(1, len(names) + 1))]


def exam() -> Iterator[Lesson]:
    """What the made model must say word for word."""
    yield from (sum_of(a, b) for a in range(1, 6) for b in range(1, 6))
    for lesson in (sum_of(2, 3), sum_of(4, 5)):
        yield Lesson(lesson.messages, lesson.answer, thinks=False)
    for i, city in enumerate(CITIES):
        weather = call("weather", [city], tools=["get_weather", "get_time"])
        yield weather
        yield call("weather", [city])
        yield call("weather", [city], tools=[])
        yield call("time", [city], tools=["get_time", "get_weather"])
        yield call("weather", [city, CITIES[i - 1]])
        yield result(weather, [city], [SKIES[i % 6]])
        yield result(call("time", [city]), [city], [HOURS[i % 4]])
    for asks, answer in known():
        yield Lesson([user(asks[0])], f"<think></think>{answer}")
