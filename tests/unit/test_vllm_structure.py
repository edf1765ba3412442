"""vLLM's own checks of schemas, regexes, grammars and tags, and what clients read of them. No engine runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.generate.base.protocol import validate_structural_tag_response_format
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

import penstock
from penstock.engines.vllm import errors
from penstock.engines.vllm.arguments.defaults import Shape, with_defaults
from penstock.engines.vllm.frontend import structured_output
from penstock.errors import BadRequest

pytestmark = pytest.mark.parity("S22", "S16")

OBJECT = {"type": "object", "properties": {"age": {"type": "integer", "multipleOf": 5}}}
UNMATCHED = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}


@pytest.fixture(scope="module", autouse=True)
def reasons() -> None:
    structured_output.tell_reasons()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(penstock.demo_model())


def check(tokenizer: Any, form: Any, config: StructuredOutputsConfig) -> SamplingParams:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    params._validate_structured_outputs(SimpleNamespace(is_diffusion=False), config, tokenizer)
    return params


def refusal(tokenizer: Any, form: Any) -> str:
    """What a client reads whose request holds this form, under our defaults."""
    ours = with_defaults({}, Shape(cpu=True, tiny=True, workers=1))["structured_outputs_config"]
    with pytest.raises(VLLMValidationError) as raised:
        check(tokenizer, form, StructuredOutputsConfig(**ours))
    error = errors.from_exception(raised.value)
    assert isinstance(error, BadRequest)
    return str(error)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "[a"}, "The regex cannot be used: Regex parsing error at position 3: Unclosed '['"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"grammar": "root ::= nowhere"}, 'line 1, column 10: Rule "nowhere" is not defined'),
        ({"grammar": 'a ::= "b"'}, 'The root rule with name "root" is not found'),
        ({"grammar": "start: nowhere"}, "The grammar cannot be used: Lark error at line 1, column 8"),
        ({"json": {"type": "nothing"}}, 'The JSON schema cannot be used: Unsupported type "nothing"'),
        ({"json": "{bad"}, "The JSON schema cannot be used: Expecting property name"),
        ({"json": OBJECT}, "at '/properties/age' it has type, multipleOf"),
        ({"structural_tag": json.dumps(UNMATCHED | {"triggers": ["<b"]})}, "does not match any trigger"),
        ({"choice": []}, "cannot be an empty list"),
        ({}, "one kind of structured outputs constraint: json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "only use one kind of structured outputs constraint: json"),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused_with_the_reason(tokenizer: Any, form: Any, says: str):
    message = refusal(tokenizer, form)
    assert says in message
    assert ".cc" not in message


@pytest.mark.parametrize("form", [{"regex": r"\d+(?P<x>a)"}, {"grammar": "root ::= "}, {"json": OBJECT}])
def test_nothing_passes_that_only_another_library_can_keep(tokenizer: Any, form: Any):
    by_vllm = check(tokenizer, form, StructuredOutputsConfig())
    assert by_vllm.structured_outputs._backend == "guidance"  # and its core has taken xgrammar already
    assert "cannot be used" in refusal(tokenizer, form)


def test_a_tag_is_refused_while_the_request_is_read():
    wrong = {"type": "structural_tag", "format": {"type": "nonsense"}}
    with pytest.raises(VLLMValidationError, match="Format type not recognized: nonsense"):
        validate_structural_tag_response_format(wrong)
