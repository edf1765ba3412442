"""A model more, or one less, in a fleet's file: what a person wrote stays."""

import pytest

from penstock.config.fleet.file_text import with_model, without_model
from penstock.errors import ConfigError

FIRST = """\
# Our models.
llm_configs:
- model_loading_config: {model_id: a}  # the small one
  aliases:
  - x
"""
SECOND = """\
-
  # the large one
  model_loading_config:
    model_id: b
    model_source: |
      ./b
"""
REST = """\

# For everyone.
gateway: {port: 9000}
"""
ADDED = """\
- model_loading_config:
    model_id: c
"""
ENTRY = {"model_loading_config": {"model_id": "c"}}


@pytest.mark.parametrize("rest", ["", REST])
@pytest.mark.parametrize("models", [FIRST, FIRST + SECOND])
def test_a_model_is_added_at_the_end(models: str, rest: str):
    assert with_model(models + rest, ENTRY) == models + ADDED + rest
    assert with_model((models + rest).removesuffix("\n"), ENTRY) == models + ADDED + rest


def test_it_is_indented_as_the_others():
    text = "llm_configs:\n    - m.yaml\n"
    assert with_model(text, ENTRY) == text + "    - model_loading_config:\n        model_id: c\n"


def test_a_model_is_removed_with_its_lines():
    assert without_model(FIRST + SECOND + REST, 1) == FIRST + REST
    assert without_model(FIRST + SECOND + REST, 0) == FIRST[: FIRST.index("- ")] + SECOND + REST


@pytest.mark.parametrize(
    "text",
    [
        "model_loading_config: {model_id: a}\n",
        "- a.yaml\n",
        "llm_configs: [a.yaml]\n",
        "llm_configs:\n- &a {model_loading_config: {model_id: a}}\nllm_config: *a\n",
    ],
    ids=["one model", "a list", "brackets", "an anchor"],
)
def test_another_form_is_refused(text: str):
    with pytest.raises(ConfigError, match="`llm_configs`"):
        without_model(text, 0)
