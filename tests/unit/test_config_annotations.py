"""Types in plain words."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le

from penstock.config.messages.type_names import choices, describe, members, shape


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


@dataclass
class Point:
    x: int = 0


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "a whole number"),
        (float, "a number"),
        (bool, "true or false"),
        (str | list[str], "text or a list, each entry text"),
        (Literal["a", "b", "c"] | None, "'a', 'b' or 'c'"),
        (Literal["a"] | str, "text"),
        (Literal[1, 8], "1 or 8"),
        (dict[str, Any], "a mapping"),
        (dict[str, int], "a mapping, each value a whole number"),
        (Point | None, "a mapping"),
        (Colour, "'RED' or 'BLUE'"),
        (Level, "0 or 1"),
        (type[int] | str, "a class or text"),
        (Annotated[int, "mark"], "a whole number"),
        (set[str], "a list, each entry text"),
    ],
)
def test_a_type_in_words(annotation, words):
    assert describe(annotation) == words


def test_limits_follow_the_type():
    assert describe(int, [Ge(1), Le(10)]) == "a whole number, at least 1, at most 10"


def test_a_long_list_of_names_is_cut():
    assert describe(enum.Enum("Many", [f"N{i}" for i in range(40)])).endswith("'N23' or one of 16 others")


def test_free_text_has_no_choices():
    assert choices(Literal["a"] | str) == []


def test_members_of_an_enum_are_choices():
    assert choices(Colour | None) == ["RED", "BLUE"]


def test_names_of_a_literal_are_no_members():
    assert members(Literal["a"] | Colour) == ["RED", "BLUE"]


def test_the_dataclass_inside_an_optional_is_found():
    assert shape(Point | None) is Point


def test_a_plain_type_has_no_shape():
    assert shape(int | None) is None
