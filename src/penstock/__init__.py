"""Penstock feeds LLM engines: one fleet of engines on Ray for online serving and offline batch.

Importing it is cheap: neither Ray nor an engine is loaded before one of its rooms is.
"""

from pathlib import Path

__version__ = "0.1.0"

__all__ = ["__version__", "demo_model"]


def demo_model() -> str:
    """Folder of the embedded demo model, in the form that `from_pretrained` and engines take as a model.

    A Qwen2-type chat model of less than a million parameters, with 16,384 positions.
    Source: recipes/demo_model, which makes it again.
    """
    return str(Path(__file__).parent / "demo")
