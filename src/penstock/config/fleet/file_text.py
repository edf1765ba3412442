"""A model more, or one less, in the text of a fleet's file: comments, order and all else stay."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.config.loading.serving_args import MODELS
from penstock.errors import ConfigError

_LINE = re.compile("[^\n\r\x85\u2028\u2029]*(?:\r\n|[\n\r\x85\u2028\u2029])")  # as YAML counts them


def write(file: Path, text: str) -> None:
    """Replaces the file as a whole, or leaves it as it is; it keeps its mode. Raises: OSError."""
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        new = Path(folder, file.name)
        new.write_bytes(text.encode())
        shutil.copymode(file, new)
        os.replace(new, file)


def with_model(text: str, entry: Mapping[str, Any]) -> str:
    """The text with `entry` at the end of `llm_configs`.

    Raises: ConfigError where the text has no such list, or has it in a form that is not edited here.
    """
    lines = _lines(text)
    models, entries = _models("".join(lines))
    added = dumped([dict(entry)], "\r\n" if lines[0].endswith("\r\n") else "\n")
    at = _end(models, lines)
    lines[at:at] = [textwrap.indent(added, models.start_mark.column * " ")]
    return _checked(lines, [*entries, dict(entry)])


def without_model(text: str, index: int) -> str:
    """The text without that entry of `llm_configs`. Raises: ConfigError as `with_model`, and for the last."""
    lines = _lines(text)
    models, entries = _models("".join(lines))
    if len(entries) == 1:
        raise ConfigError(
            "A fleet needs at least one model, and this is its last. Add another one first, or end the "
            "service with `penstock stop`."
        )
    entry = models.value[index]
    first, dash = entry.start_mark.line, models.start_mark.column
    while first > models.start_mark.line and not lines[first][dash:].startswith("-"):
        first -= 1
    del lines[first : _end(entry, lines)]
    return _checked(lines, [*entries[:index], *entries[index + 1 :]])


def dumped(value: Any, line_end: str = "\n") -> str:
    """As YAML."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, line_break=line_end)


def _lines(text: str) -> list[str]:
    """With their ends, which the last one gets where it has none."""
    return _LINE.findall(text if _LINE.fullmatch(text[-1:]) else f"{text}\n")


def _models(text: str) -> tuple[Any, list[Any]]:
    """The list's node, and its entries."""
    root: Any = yaml.compose(text, yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == MODELS and isinstance(value, yaml.SequenceNode):
            return value, yaml.safe_load(text)[MODELS]
    raise ConfigError(
        f"The fleet's file has no list `{MODELS}` at its top: give it one, with a model in each entry."
    )


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
