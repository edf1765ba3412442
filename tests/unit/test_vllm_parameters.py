"""Sampling parameters on their way to vLLM: what its core could not decode does not leave for it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from penstock.engines.vllm.deltas import sampling
from penstock.errors import BadRequest

NAMES = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
ODD: list[Any] = [True, 0, 1, -1, 1.5, "5", "", None, [], [True], ["a"], [[1]], {}, {"a": True}, {"1": "x"}]


def crosses(params: SamplingParams) -> bool:
    """Whether the core can decode them."""
    request = EngineCoreRequest("id", [1], None, params, None, 0.0, None, None, None)
    frames = MsgpackEncoder().encode(request)
    return MsgpackDecoder(EngineCoreRequest).decode(frames).sampling_params is not None


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_parameter_holds_it_is_refused_or_the_core_can_read_it(name: str):
    for value in ODD:
        try:
            params = sampling({name: value})
        except (BadRequest, VLLMClientError, ValueError):
            continue
        assert crosses(params), value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"n": True}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"stop": ["a", 5]}, "stop"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"repetition_detection": {"max_pattern_size": True}}, "repetition_detection"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(given: dict[str, Any], named: str):
    with pytest.raises(BadRequest, match=named) as refused:
        sampling(given)
    assert str(refused.value.facts["param"]).startswith(named)


def test_what_json_writes_is_taken():
    """Whole numbers for others, and names for the numbers of tokens."""
    params = sampling({"temperature": 1, "logit_bias": {"5": 2}, "repetition_detection": {"min_count": 3}})
    assert params.temperature == 1.0
    assert params.logit_bias == {5: 2.0}
    assert params.repetition_detection is not None
    assert params.repetition_detection.min_count == 3
