"""Penstock feeds LLM engines: one fleet of engines on Ray for online serving and offline batch.

Importing it is cheap: neither Ray nor an engine is loaded before one of its rooms is.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.table.job import batch as batch
    from penstock.data.table.llm import LLM as LLM

__version__ = "0.1.0"

__all__ = ["LLM", "__version__", "batch", "demo_model"]

_MODULES = {"LLM": "penstock.data.table.llm", "batch": "penstock.data.table.job"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def demo_model() -> str:
    """Folder of the embedded demo model, in the form that `from_pretrained` and engines take as a model.

    A Qwen2-type chat model of less than a million parameters, with 16,384 positions.
    Source: recipes/demo_model, which makes it again.
    """
    return str(Path(__file__).parent / "demo")
