"""Paths in a config file: relative ones count from the file's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

_RELATIVE = ("./", "../")


def from_file(path: str, info: ValidationInfo) -> str:
    """An absolute path on this machine. In configs made in Python it counts from the working directory."""
    return str((_folder(info) or Path()).absolute() / os.path.expanduser(path))


def _source_from_file(source: str, info: ValidationInfo) -> str:
    """A source that begins with `./` or `../` is a folder. What is only in the working directory stays."""
    folder = _folder(info)
    if folder is None or not source.startswith(_RELATIVE):
        return source
    found = (folder / source).resolve()
    return source if Path(source).exists() and not found.exists() else str(found)


def _folder(info: ValidationInfo) -> Path | None:
    """Of the config file that is read; None for configs that are made in Python."""
    file = info.context[0].file if info.context else ""
    return Path(file).parent if file else None


Source = Annotated[str, Field(min_length=1), AfterValidator(_source_from_file)]
"""Of a model, a tokenizer or adapters."""

LocalFile = Annotated[str, Field(min_length=1), AfterValidator(from_file)]
