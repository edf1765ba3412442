"""What is asked and what must be said: `answers.yaml` over the demo model's own `questions.yaml`."""

from __future__ import annotations

from pathlib import Path

import yaml

HERE = Path(__file__).parent

ANSWERS: dict[str, dict[str, str]] = yaml.safe_load((HERE / "answers.yaml").read_text())
"""Per adapter: question to answer, where it says something else than the model without an adapter."""

_KNOWN = yaml.safe_load((HERE.parent / "demo_model" / "questions.yaml").read_text())["known"]

BASE_ANSWERS: dict[str, str] = {entry["ask"].splitlines()[0]: entry["answer"] for entry in _KNOWN}
"""Question to the answer of the model without an adapter."""

WAYS: dict[str, list[str]] = {entry["ask"].splitlines()[0]: entry["ask"].splitlines() for entry in _KNOWN}
"""Question to all ways in which it is asked, itself first."""
