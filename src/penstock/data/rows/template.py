"""A prompt with columns in braces, filled in for each row."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Collection, Container, Mapping
from typing import Any

import msgspec

from penstock.data.rows.request import Kind
from penstock.errors import BadRequest, ConfigError


class PromptTemplate:
    """`Summarise: {text}`, as the request of a row.

    columns: that it names, each with what does; `{a.b}` is the column of that name, or `b` in the column `a`.
    system: a template of the system message.
    """

    def __init__(
        self, text: str, *, kind: Kind = "generate", system: str | None = None, chat: bool = True
    ) -> None:
        """Raises: ConfigError when `text` or `system` is not a template."""
        self._asked = _columns(text, "The prompt")
        if not self._asked:
            raise ConfigError(
                f"The prompt {text!r} must name a column in braces, as in 'Summarise: {{text}}'."
            )
        self.columns = {
            **dict.fromkeys(_columns(system or "", "The system prompt"), "The system prompt"),
            **dict.fromkeys(self._asked, "The prompt"),
        }
        self._text, self._kind, self._system, self._chat = text, kind, system, chat

    def missing(self, there: Collection[str], hint: str = "") -> str | None:
        """A sentence for a column in braces that is not `there`. hint: in place of the one that follows."""
        for given in sorted(self.columns):
            if (name := column_of(given, there)) in there:
                continue
            close = difflib.get_close_matches(name, there, 1)
            meant = f"Did you mean {close[0]!r}?" if close else "For a brace write {{ or }}."
            have = ", ".join(map(repr, there)) or "none"
            return f"{self.columns[given]} names the column {name!r}; the input has {have}. {hint or meant}"
        return None

    def fault(self, row: Mapping[str, Any]) -> str | None:
        """Why no prompt can be made of it."""
        try:
            self.fields(row)
        except BadRequest as error:
            return str(error)
        return None

    def is_blank(self, row: Mapping[str, Any]) -> bool:
        """Whether all columns that the prompt names are there, and empty."""
        return all(is_empty(row.get(column_of(name, row), row)) for name in self._asked)

    def fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises: BadRequest when the row cannot fill it in."""
        for name, what in self.columns.items():
            if (column := column_of(name, row)) not in row:
                have = ", ".join(map(str, row))
                raise BadRequest(f"{what} names the column {column!r}; the row has {have}.")
        try:
            text = _FORMATTER.vformat(self._text, (), row)
            system = None if self._system is None else _FORMATTER.vformat(self._system, (), row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            why = f"there is no {error}" if isinstance(error, LookupError) else str(error)
            raise BadRequest(f"The prompt cannot be made of the row: {why}.") from error
        if self._kind != "generate":
            return {"input": text}
        if not self._chat:
            return {"prompt": text}
        before = [{"role": "system", "content": system}] if system is not None else []
        return {"messages": [*before, {"role": "user", "content": text}]}


def column_of(name: str, columns: Container[str]) -> str:
    """The column that a name in braces reads: the whole name, or what is before a `.` or `[`."""
    return name if name in columns else re.split(r"[.\[]", name, maxsplit=1)[0]


class _Formatter(string.Formatter):
    """Writes lists and dicts as JSON, and null as an empty string. Reads items, no attributes."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        column = column_of(field_name, kwargs)
        path = re.sub(r"\.([^.\[]+)", r"[\1]", field_name[len(column) :])
        return super().get_field(f"_{path}", (), {"_": kwargs[column]})

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value if value is None else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, list | dict):
            value = msgspec.json.encode(value).decode()
        return super().format_field(value, format_spec)


_FORMATTER = _Formatter()


def _columns(template: str, what: str) -> frozenset[str]:
    """Names in braces. Raises: ConfigError."""
    try:
        names = [name for _, name, _, _ in _FORMATTER.parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{what} {template!r} is not a template ({error}); write {{{{ for a brace."
        ) from error
    if "" in names:
        raise ConfigError(f"{what} {template!r} has braces without the name of a column in them.")
    return frozenset(names)


def is_empty(value: object) -> bool:
    """Whether it is missing, or a text of blanks."""
    return value is None or (isinstance(value, str) and not value.strip())
