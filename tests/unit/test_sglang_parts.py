"""What stands between us and SGLang, without SGLang: command line, parameters, errors, metrics."""

import sys
from pathlib import Path

import msgspec
import pytest

from penstock.config import LLMConfig
from penstock.engines.sglang import errors, metrics, parameters, version
from penstock.engines.sglang.flags import SGLangOptions, as_process, flags
from penstock.errors import BadRequest

pytestmark = pytest.mark.parity("S27")


def command(**engine_kwargs) -> list[str]:
    config = LLMConfig(
        model_loading_config={"model_id": "a:b", "model_source": "c"},
        llm_engine="SGLang",
        accelerator_config={"kind": "gpu"},
        engine_kwargs=engine_kwargs,
    )
    return as_process(config, SGLangOptions.model_validate(engine_kwargs)).engine_kwargs["command"]


def test_arguments_are_flags_in_sglangs_form():
    arguments = {
        "tp_size": 2,
        "enable_lora": True,
        "disable_radix_cache": False,
        "dllm_fdfo": False,
        "lora_paths": ["a=b", "c"],
        "json_model_override_args": {"a": 1},
        "chat_template": None,
    }
    assert list(flags(arguments)) == [
        "--tp-size=2",
        "--enable-lora",
        "--no-dllm-fdfo",
        "--lora-paths",
        "a=b",
        "c",
        '--json-model-override-args={"a": 1}',
    ]


def test_its_own_interpreter_runs_the_server_under_a_name_without_colons():
    words = command(python="/opt/sglang/bin/python", mem_fraction_static=0.5)
    assert words[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert {"--model-path={model}", "--served-model-name=a-b", "--mem-fraction-static=0.5"} <= {*words}


def test_penstocks_interpreter_runs_it_where_none_is_named():
    assert command()[0] == "{python}"


def test_parameters_get_sglangs_names():
    sampling, beside = parameters.native(
        {"max_tokens": 3, "min_tokens": 1, "seed": 7, "top_k": 0, "logprobs": 2, "stop": None}, seeds=True
    )
    assert sampling == {"max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 7, "top_k": -1}
    assert beside == {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}


def test_a_choice_is_a_regex_of_the_words_themselves():
    sampling, _ = parameters.native({"structured_outputs": {"choice": ["a.b", "c"]}}, seeds=False)
    assert sampling["regex"] == r"a\.b|c"


@pytest.mark.parametrize(
    "form", [{}, {"json": {}, "regex": "a"}, {"lark": "a"}, "json", {"structural_tag": "{"}]
)
def test_a_form_that_is_none_is_refused(form):
    with pytest.raises(BadRequest, match="structured"):
        parameters.in_body({"structured_outputs": form}, frozenset(), seeds=False)


def test_a_body_keeps_what_is_known_and_drops_what_has_no_effect():
    given = {"model": "m", "store": True, "stop": None, "include_stop_str_in_output": True}
    assert parameters.in_body(given, frozenset({"model", "no_stop_trim"}), seeds=False) == {
        "model": "m",
        "no_stop_trim": True,
    }


@pytest.mark.parametrize("name", ["best_of", "suffix", "parallel_tool_calls", "seed", "unheard_of"])
def test_what_would_be_ignored_is_refused(name):
    known = frozenset({"best_of", "suffix", "parallel_tool_calls", "seed"})
    with pytest.raises(BadRequest) as raised:
        parameters.in_body({name: False}, known, seeds=False)
    assert raised.value.facts == {"param": name}


def body(message: str) -> bytes:
    return msgspec.json.encode({"object": "error", "message": message, "code": 400})


def test_what_fits_no_form_is_told_without_files_and_values():
    said = (
        "2 validation errors:\n  {'type': 'x', 'loc': ('body', 'stop', 'list[str]'), 'msg': 'Input should be "
        "a list', 'input': 7}\n  {'type': 'x', 'loc': ('body', 'stop'), 'msg': \"It's wrong\"}\n\n"
        '  File "http_server.py", line 1'
    )
    error = errors.heard(body(said), 400)
    assert str(error) == "stop: Input should be a list; stop: It's wrong."
    assert error.facts == {"param": "stop"}


def test_a_prompt_over_the_window_is_known_by_sglangs_words():
    said = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    assert errors.heard(body(said), 400).code == "context_length_exceeded"


def test_metrics_have_vllms_names_beside_sglangs():
    theirs = (
        'sglang:prompt_tokens_total{is_streaming="true",model_name="a-b"} 3.0\n'
        'sglang:prompt_tokens_total{is_streaming="false",model_name="a-b"} 4.0\n'
    )
    text = metrics.exposition(theirs, "a-b", "a:b", {"vllm:num_requests_running": 2})
    assert 'sglang:prompt_tokens_total{is_streaming="true",model_name="a:b"} 3.0' in text
    assert 'vllm:num_requests_running{model_name="a:b"} 2' in text
    assert 'vllm:prefix_cache_queries_total{model_name="a:b"} 7.0' in text
    assert 'vllm:prefix_cache_hits_total{model_name="a:b"} 0' in text


@pytest.mark.parametrize(("found", "warns"), [("0.6.0", True), (version.KNOWN, False)])
def test_another_version_is_told_in_the_log(found: str, warns: bool, tmp_path: Path, caplog):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {found}\n")
    python.chmod(0o755)
    version.warn_of_another(str(python))
    assert (f"SGLang {found} is installed" in caplog.text) == warns


def test_an_interpreter_that_cannot_say_is_left_to_the_start(tmp_path: Path, caplog):
    for python in (str(tmp_path / "missing"), "/bin/false", sys.executable):
        version.warn_of_another(python)
    assert caplog.text == ""
