"""Where something was written: file, line, path of keys. The front half of every problem's sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """Where in which file something was written. All are equal: they never make configs differ."""

    file: str = field(default="", compare=False)
    path: Path = field(default=(), compare=False)
    lines: Mapping[Path, int] = field(default_factory=dict[Path, int], compare=False)

    def __truediv__(self, part: str | int) -> Location:
        return Location(self.file, (*self.path, part), self.lines)

    def __str__(self) -> str:
        """`config.yaml:14: applications[0].args.llm_configs[1].engine_kwargs.x`, as far as known."""
        parts = [f"{self.file}:{self.line}" if self.line else self.file, dotted(self.path)]
        return ": ".join(part for part in parts if part)

    @property
    def line(self) -> int | None:
        """Line of the nearest enclosing key that the file has, counted from 1."""
        for end in range(len(self.path), -1, -1):
            if self.path[:end] in self.lines:
                return self.lines[self.path[:end]]
        return None

    def says(self, text: str) -> str:
        """`text` after this location."""
        return f"{self}: {text}" if str(self) else text

    def fault(self, text: str) -> ConfigError:
        """The error that says `text` of this location."""
        return ConfigError(self.says(text))


def dotted(path: Path) -> str:
    """`("a", 0, "b")` as `a[0].b`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
