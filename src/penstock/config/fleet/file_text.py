"""A model more, or one less, in the text of a fleet's file: comments, order and all else stay."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from penstock.config.loading.serving_args import MODELS
from penstock.errors import ConfigError


def with_model(text: str, entry: Mapping[str, Any]) -> str:
    """The text with `entry` at the end of `llm_configs`.

    Raises: ConfigError where the text has no such list, or has it in a form that is not edited here.
    """
    lines = [f"{line}\n" for line in text.splitlines()]
    models, entries = _models("".join(lines))
    added = yaml.safe_dump([dict(entry)], sort_keys=False, allow_unicode=True)
    at = _end(models, lines)
    lines[at:at] = [textwrap.indent(added, models.start_mark.column * " ")]
    return _checked(lines, [*entries, dict(entry)])


def without_model(text: str, index: int) -> str:
    """The text without that entry of `llm_configs`. Raises: ConfigError, as `with_model`."""
    lines = [f"{line}\n" for line in text.splitlines()]
    models, entries = _models("".join(lines))
    entry = models.value[index]
    first, dash = entry.start_mark.line, models.start_mark.column
    while first > models.start_mark.line and not lines[first][dash:].startswith("-"):
        first -= 1
    del lines[first : _end(entry, lines)]
    return _checked(lines, [*entries[:index], *entries[index + 1 :]])


def _models(text: str) -> tuple[Any, list[Any]]:
    """The list's node, and its entries."""
    root: Any = yaml.compose(text, yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == MODELS and isinstance(value, yaml.SequenceNode):
            return value, yaml.safe_load(text)[MODELS]
    raise ConfigError(f"has no list `{MODELS}` at its top: give it one, with a model in each entry.")


def _end(node: Any, lines: list[str]) -> int:
    """The number of the line after the node's last. PyYAML counts comments to the collection before them, and
    blank lines to a text.
    """
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = node.end_mark.line + bool(node.end_mark.column)
    while not lines[end - 1].strip():
        end -= 1
    return end


def _checked(lines: list[str], entries: list[Any]) -> str:
    """The new text, if it says that."""
    text = "".join(lines)
    try:
        is_right = yaml.safe_load(text)[MODELS] == entries
    except (yaml.YAMLError, TypeError, KeyError):
        is_right = False
    if not is_right:  # a list in brackets, an anchor that others use
        raise ConfigError(f"`{MODELS}` is written in a form that only you can change: edit and apply it.")
    return text
