"""What a model says that was asked for another task. No vLLM is needed for that."""

from types import SimpleNamespace

import pytest

from penstock.engines.vllm.endpoints import absence

pytestmark = pytest.mark.parity("S12", "S16")

EMBEDDER = [SimpleNamespace(path=path) for path in ("/v1/models", "/pooling", "/v1/embeddings", "/v2/embed")]


def test_a_model_of_another_task_names_its_endpoints():
    error = absence("bge", EMBEDDER)("/v1/chat/completions")
    assert str(error) == (
        "Model 'bge' does not answer /v1/chat/completions; it answers /v1/embeddings, /v2/embed, /pooling."
    )
    assert (error.status, error.code, error.facts["param"]) == (404, "endpoint_not_supported", "model")


def test_what_is_missing_below_an_endpoint_is_not_its_absence():
    absent = absence("bge", EMBEDDER)
    assert absent("/v1/embeddings") is None
    assert absent("/v1/responses/resp_1") is None
