"""Which requests may share one answer."""

import pytest

from penstock.data import HttpRequestProcessorConfig, ServeDeploymentProcessorConfig
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.data.rows.digest import is_deterministic

URL = HttpRequestProcessorConfig(url="http://host/v1/chat/completions")
CALL = ServeDeploymentProcessorConfig()
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parity("D12")
@pytest.mark.parametrize(
    ("config", "row", "shared"),
    [
        (URL, {"payload": {"messages": MESSAGES}}, False),
        (URL, {"payload": {"messages": MESSAGES, "temperature": 0}}, True),
        (URL, {"payload": {"messages": MESSAGES, "seed": 1}}, True),
        (URL, {"payload": {"file": b"sound"}}, False),
        (CALL, {"method": "chat", "request_kwargs": {"messages": MESSAGES}}, False),
        (CALL, {"messages": MESSAGES, "temperature": 0}, True),
    ],
)
def test_a_sampled_answer_is_not_shared_however_it_is_asked_for(config, row, shared):
    assert is_deterministic(stage_spec(config).build_request(row, {})) is shared
