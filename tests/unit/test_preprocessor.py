"""The limit of time of a preprocessor that is a deployment, in Serve's local testing mode, without Ray."""

import asyncio

import pytest
from ray import serve

from penstock.config import LLMConfig
from penstock.errors import Unavailable
from penstock.hooks import Context
from penstock.serve.replica.preprocessor import RemotePreprocessor, application

pytestmark = pytest.mark.parity("X13")


async def never(request):
    await asyncio.Event().wait()


async def test_no_answer_in_time_is_503():
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        preprocessor=never,
        preprocessor_options={"timeout_s": 0.2},
    )
    handle = serve.run(application(config), _local_testing_mode=True)
    with pytest.raises(Unavailable, match=r"within 0.2 s.*timeout_s") as caught:
        await RemotePreprocessor(handle, config)({}, Context(config))
    assert caught.value.status == 503
