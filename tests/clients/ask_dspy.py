"""DSPy: chat and Responses by `dspy.LM`, embeddings, and an unknown model's error."""

import os

import dspy
import pytest
from dspy.utils.exceptions import LMUnsupportedModelError

common = {"api_base": os.environ["OPENAI_BASE_URL"], "temperature": 0, "cache": False, "num_retries": 0}

for kind in ("chat", "responses"):
    (said,) = dspy.LM("openai/assistant", model_type=kind, **common)("What is 2 + 3?")
    assert (said if isinstance(said, str) else said["text"]) == "The sum is 5.", said

embed = dspy.Embedder("openai/embedder", api_base=common["api_base"], caching=False)
assert embed(["one", "two"]).shape[0] == 2

with pytest.raises(LMUnsupportedModelError, match="'nobody' is not served here"):
    dspy.LM("openai/nobody", **common)("What is 2 + 3?")
