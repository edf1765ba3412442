"""Caches vLLM's answers about arguments on disk, by question, Python, pydantic and vLLM.

A question takes five seconds on an idle machine, since it imports vLLM; without a cache, so would each
`penstock check`. Nothing depends on the cache: without its folder everything is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic_core

from penstock.config.messages.redact import masked


def find(question: str) -> dict[str, Any] | None:
    """The cached answer to this question, of this vLLM."""
    try:
        return json.loads(_file(question).read_text())
    except (OSError, ValueError, RuntimeError):  # the last one where this user has no home
        return None


def keep(question: str, answer: dict[str, Any]) -> None:
    """Caches an answer, unless it holds a secret."""
    if masked(answer) != answer:
        return
    try:
        file = _file(question)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(answer, new)
        os.replace(new.name, file)
    except (OSError, RuntimeError):
        return


def _file(question: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256("\0".join([question, *_circumstances()]).encode()).hexdigest()
    return Path(cache) / "penstock" / "vllm-arguments" / f"{digest}.json"


def _circumstances() -> list[str]:
    """All else that an answer depends on: Python, pydantic, vLLM, our own questions, vLLM's environment."""
    found = find_spec("vllm")
    files = [found.origin] if found and found.origin else []
    files += [str(file) for file in sorted(Path(__file__).parent.glob("*.py"))]
    stamps = [f"{file} {os.stat(file).st_mtime_ns}" for file in files]
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("VLLM_"))
    return [sys.executable, pydantic_core.__version__, *stamps, *settings]
