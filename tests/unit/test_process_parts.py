"""What an engine in a process of its own is told, and what its child's texts mean. Nothing is started."""

from __future__ import annotations

import pytest

from penstock.config import LLMConfig
from penstock.engines.check import check_arguments
from penstock.engines.process.gauges import Gauges, read
from penstock.engines.process.options import filled

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100",user_specified_block_size="True"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="a"} 4
sglang:num_queue_reqs{model_name="a"} 2
sglang:token_usage{model_name="a"} 0.5
sglang:max_total_num_tokens{model_name="a"} 4096
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


@pytest.mark.parametrize(
    ("text", "gauges"),
    [
        (VLLM, Gauges(5, 1, 0.25, 3200)),
        (SGLANG, Gauges(4, 2, 0.5, 4096)),
        (LLAMA, Gauges(1, 0)),
        ("python_gc_objects_collected_total 1.0", None),
    ],
)
def test_gauges_are_known_by_the_names_of_their_engines(text: str, gauges: Gauges | None):
    assert read(text) == gauges


def problems(**engine_kwargs: object) -> str:
    config = LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="Process", engine_kwargs=engine_kwargs
    )
    return "\n".join(check_arguments([config]).problems)


def test_a_placeholder_that_means_nothing_is_refused():
    said = problems(command=["server", "--port", "{prot}", '{"json": 1}'])
    assert "unknown placeholder 'prot'; did you mean 'port'" in said
    assert "--port" not in said


def test_a_command_is_wanted():
    assert "command" in problems()


def test_placeholders_are_filled_and_other_braces_stay():
    assert filled('{host}:{port} {"a": {}}', {"host": "h", "port": "1"}) == 'h:1 {"a": {}}'
