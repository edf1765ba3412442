"""Pictures of one coloured shape each, drawn by code."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 30, 35),
    "green": (35, 160, 60),
    "blue": (35, 70, 215),
    "yellow": (245, 215, 40),
    "purple": (135, 45, 165),
    "black": (15, 15, 15),
}
SIZES = ((56, 56), (64, 64), (84, 84), (112, 112), (84, 56), (120, 80))
SHAPES = ("circle", "square", "triangle", "cross")
_PAPER = (245, 245, 245)

Colour = tuple[int, int, int]


def draw(
    colour: str,
    shape: str,
    size: tuple[int, int] = (112, 112),
    *,
    radius: float = 0.36,
    centre: tuple[float, float] = (0.5, 0.5),
    background: Colour = (255, 255, 255),
    fill: Colour | None = None,
) -> Image.Image:
    """A picture of `size` pixels.

    radius: in shorter sides. centre: in sides. fill: a tone of `colour`.
    """
    picture = Image.new("RGB", size, background)
    pen, paint = ImageDraw.Draw(picture), fill or COLOURS[colour]
    reach = radius * min(size)
    x, y = centre[0] * size[0], centre[1] * size[1]
    box = (x - reach, y - reach, x + reach, y + reach)
    if shape == "circle":
        pen.ellipse(box, paint)
    elif shape == "square":
        pen.rectangle(box, paint)
    elif shape == "triangle":
        pen.polygon([(x, y - reach), (x + reach, y + reach), (x - reach, y + reach)], paint)
    else:
        bar = reach / 3
        pen.rectangle((x - reach, y - bar, x + reach, y + bar), paint)
        pen.rectangle((x - bar, y - reach, x + bar, y + reach), paint)
    return picture


def drawn(colour: str, shape: str, rng: random.Random) -> Image.Image:
    """`shape` in a tone of `colour`, somewhere in a picture of some size."""
    size = rng.choice(SIZES)
    radius = rng.uniform(0.34, 0.44)
    return draw(
        colour,
        shape,
        size if rng.random() < 0.5 else size[::-1],
        radius=radius,
        centre=(rng.uniform(0.47, 0.53), rng.uniform(0.47, 0.53)),
        background=_tone(_PAPER, rng),
        fill=_tone(COLOURS[colour], rng),
    )


def _tone(colour: Colour, rng: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, value + rng.randint(-15, 15))) for value in colour)
    return red, green, blue
