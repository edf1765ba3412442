"""Models that tests ask for what they mean: made by `recipes` at first use, then taken from its cache."""

from pathlib import Path

from recipes import shelf


def model(name: str) -> Path:
    """The folder of the model that `recipes/NAME` makes, which takes a minute or two, once per machine."""
    return shelf.made(name)
