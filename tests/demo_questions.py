"""What the embedded demo model must answer, from the file that it was trained on."""

from pathlib import Path

import yaml

RECIPE = Path(__file__).parent.parent / "recipes" / "demo_model"

_DATA = yaml.safe_load((RECIPE / "questions.yaml").read_text())

QUESTIONS: dict[str, str] = {entry["ask"].splitlines()[0]: entry["answer"] for entry in _DATA["known"]}
"""Question to answer, word for word."""

UNKNOWN_ANSWER: str = _DATA["unknown"]["answer"]
"""What it says to a question that it does not know."""
