"""What the model learns to say of pictures and videos. A lesson knows nothing of tokens or models."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from PIL.Image import Image

from recipes.vision.pictures import COLOURS, SHAPES, draw, drawn

ORDER = ("first", "second")
ONE = ("What is in the picture?", "What is this?", "What's in this image?")
NTH = ("What is in the {} picture?", "What does the {} picture show?")
ALL = ("What is in the pictures?", "Name them all.", "Describe the pictures.")
VIDEO = ("What is in the video?", "What does the video show?")
NOTHING = "There is no picture."
TOOL = {
    "type": "function",
    "function": {
        "name": "report_shape",
        "description": "Files what a picture shows.",
        "parameters": {
            "type": "object",
            "properties": {
                "color": {"type": "string", "enum": list(COLOURS)},
                "shape": {"type": "string", "enum": list(SHAPES)},
            },
            "required": ["color", "shape"],
        },
    },
}

Kind = tuple[str, str]
KINDS: tuple[Kind, ...] = tuple(itertools.product(COLOURS, SHAPES))


@dataclass(frozen=True)
class Lesson:
    """`question`, asked before or after what is shown, and the `answer` that must follow."""

    question: str
    answer: str
    pictures: list[Image] = field(default_factory=list[Image])
    video: list[Image] = field(default_factory=list[Image])
    asked_first: bool = False
    tools: bool = False

    def messages(self) -> list[dict[str, Any]]:
        shown = [{"type": "image"} for _ in self.pictures] + [{"type": "video"}] * bool(self.video)
        asked = [{"type": "text", "text": self.question}]
        return [{"role": "user", "content": asked + shown if self.asked_first else shown + asked}]


def said(kind: Kind) -> str:
    """What the model calls a shape."""
    colour, shape = kind
    return f"a {colour} {shape}"


def called(kind: Kind) -> str:
    """The tool call that reports a shape."""
    colour, shape = kind
    arguments = f'{{"color": "{colour}", "shape": "{shape}"}}'
    return f'<tool_call>{{"name": "report_shape", "arguments": {arguments}}}</tool_call>'


def taught(
    rng: random.Random, picture: Callable[[Kind], Image], video: Callable[[Kind], list[Image]]
) -> Lesson:
    """One lesson on what `picture` and `video` give."""
    first = rng.random() < 0.3
    sort = rng.choices(("one", "tool", "nth", "all", "video", "none"), (3, 1.5, 5, 5, 1.5, 0.3))[0]
    if sort == "none":
        return Lesson(rng.choice(ONE + ALL), NOTHING)
    many = rng.choices(KINDS, k=2 if sort in ("nth", "all") else 1)
    if sort == "video":
        return Lesson(rng.choice(VIDEO), said(many[0]), video=video(many[0]), asked_first=first)
    pictures = [picture(kind) for kind in many]
    if sort == "tool":
        return Lesson(rng.choice(ONE), called(many[0]), pictures, asked_first=first, tools=True)
    if sort == "nth":
        which = rng.randrange(len(many))
        return Lesson(rng.choice(NTH).format(ORDER[which]), said(many[which]), pictures, asked_first=first)
    return Lesson(
        rng.choice(ONE if sort == "one" else ALL), ", ".join(map(said, many)), pictures, asked_first=first
    )


def texts() -> list[str]:
    """All that is asked and said."""
    asked = [*ONE, *ALL, *VIDEO, NOTHING, *(form.format(nth) for form in NTH for nth in ORDER)]
    before = "<|im_start|>tools\nreport_shape(color, shape)\n<|im_end|>\n<|im_start|>user\nPicture 2:"
    after = "<|im_end|>\n<|im_start|>assistant\n"
    return [f"{before}{question}{after}{said(kind)}, {called(kind)}" for question in asked for kind in KINDS]


def exam() -> Iterator[Lesson]:
    """What must be right: each shape plainly drawn, and many lessons on pictures not seen before."""
    for kind in KINDS:
        yield Lesson(ONE[0], said(kind), [draw(*kind)])
    rng = random.Random(1)
    for _ in range(150):
        yield taught(
            rng, lambda kind: drawn(*kind, rng), lambda kind: [drawn(*kind, rng)] * 2 * rng.randint(1, 6)
        )
