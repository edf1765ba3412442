"""Configs of processors: what is wrong with one is said where it is written."""

import pytest

from penstock.data import vLLMEngineProcessorConfig


@pytest.mark.parity("D15")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model_source": "demo", "batchsize": 3}, "batch_size"),
        ({"model_source": "demo", "concurrency": 0}, "concurrency"),
        ({"model_source": "demo", "concurrency": (3, 2)}, "concurrency"),
        ({}, "model_source"),
        ({"model": "demo", "model_source": "demo"}, "one model"),
        ({"model": "demo", "task_type": "sing"}, "generate"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(wrong, says):
    with pytest.raises(ValueError, match=says):
        vLLMEngineProcessorConfig(**wrong)
