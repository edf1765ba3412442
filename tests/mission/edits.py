"""Code blocks of the founding documents, with the whole list of edits under which they run.

Read from the folder `shared/mission` beside the project.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.models import model
from tests.pictures import data_url

from recipes.vision.pictures import draw

MISSION = Path(__file__).parents[2].parent / "shared" / "mission"

PICTURE = data_url(draw("red", "circle"))

EDITS = [
    # The project's prefix instead of Ray's.
    ("ray.serve.llm", "penstock.serve"),
    ("ray.data.llm", "penstock.data"),
    # The embedded model instead of one from a hub. The model ids stay.
    (r"Qwen/Qwen2.5-\d.\dB-Instruct", "demo"),
    (r"meta-llama/(Meta-Llama-3|Llama-3.1)-8B-Instruct", "demo"),
    # A vision model made here instead of one from a hub, and a picture of our own in the request itself.
    (r"mistral-community/pixtral-12b", lambda _: str(model("vision"))),
    (r"https://example.com/image.jpg", PICTURE),
    # Two slips of the pages: a comma is missing before `stream=True`; a `for` lost its body's indentation.
    (r'("Hello!"}\])\n(\s+stream=True)', r"\1,\n\2"),
    # A third: the clients of the adapters and of the picture read a stream that they have not asked for.
    (r'("Hello!"}\])\n\)\n\nfor chunk', r"\1,\n    stream=True,\n)\n\nfor chunk"),
    (r"(?m)^    \]\n\)\n\nfor chunk", "    ],\n    stream=True,\n)\n\nfor chunk"),
    (r"(?m)^(for chunk in response:)\n(if .*:)\n(print.*)$", r"\1\n    \2\n        \3"),
    # One device: this machine has no two.
    (r"tensor_parallel_size=2", "tensor_parallel_size=1"),
]
# `accelerator_type="A10G"` is left as it is: PENSTOCK_ACCELERATOR=cpu runs any config on CPU.


def edited(code: str) -> str:
    for pattern, replacement in EDITS:
        code = re.sub(pattern, replacement, code)
    return code


def blocks(language: str) -> list[str]:
    """The code blocks of mission/3, dedented, in the order of the page."""
    text = (MISSION / "3-serving-overview.txt").read_text()
    found = re.findall(rf"(?m)^( *)\.\. code-block:: {language}\n\n((?:\1 +.*\n|\s*\n)+)", text)
    return [textwrap.dedent(body) for _, body in found]


def block(language: str, *signs: str, without: str = "\0") -> str:
    """The first block that holds all `signs`, edited."""
    for body in blocks(language):
        if all(sign in body for sign in signs) and without not in body:
            return edited(body)
    raise LookupError(f"No {language} block with {signs}.")


def announcement(*signs: str) -> str:
    """A program of mission/2, without the line numbers that stuck to it, edited."""
    text = (MISSION / "2-announcement.txt").read_text()
    for body in re.findall(r"```bash\n(.*?)```", text, re.S):
        if all(sign in body for sign in signs):
            return edited(re.sub(r"(?m)^\d+", "", body))
    raise LookupError(f"No program with {signs}.")
