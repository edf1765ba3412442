"""Asking about arguments where vLLM is missing, broken, or was asked before. vLLM itself is not needed."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from penstock.config import LLMConfig
from penstock.engines.vllm.arguments import answer_cache
from penstock.engines.vllm.arguments.check import check_arguments, is_opaque, parse_flags, to_json
from penstock.errors import EngineStartFailed


def config(**engine_kwargs) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "m"}, engine_kwargs=engine_kwargs)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.fixture
def broken_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_without_vllm_it_is_said_that_nothing_was_checked(no_vllm):
    findings = check_arguments([config(max_modl_len=1)])
    assert findings.problems == ()
    assert findings.notices == (
        "engine_kwargs of 'm' are not checked: vLLM is not installed here. The replica will check them.",
    )


def test_without_vllm_and_without_arguments_nothing_is_said(no_vllm):
    assert check_arguments([config()]).notices == ()


def test_without_vllm_flags_cannot_be_read(no_vllm):
    with pytest.raises(EngineStartFailed, match="vLLM is not installed here"):
        parse_flags(["--max-model-len", "8192"])


def test_no_flags_are_no_arguments(no_vllm):
    assert parse_flags([]) == {}


def test_a_broken_vllm_gives_its_own_reason(broken_vllm):
    with pytest.raises(EngineStartFailed, match=r"cannot be asked .* libcudart\.so\.13 is missing"):
        check_arguments([config(max_model_len=1)])


def test_a_failure_is_not_kept(broken_vllm):
    question = {"engine_kwargs": [{"max_model_len": 1}]}
    with pytest.raises(EngineStartFailed):
        check_arguments([config(max_model_len=1)])
    assert answer_cache.find(to_json(question)) is None


def test_what_plainly_fits_is_not_asked_about(broken_vllm):
    answer_cache.keep("plain arguments", {"max_model_len": {"type": "int", "ge": -1}})
    assert check_arguments([config(max_model_len=1), config(max_model_len=-1)]).problems == ()
    for doubtful in (config(max_model_len=-2), config(max_model_len="1"), config(max_modl_len=1)):
        with pytest.raises(EngineStartFailed):
            check_arguments([config(max_model_len=1), doubtful])


def test_an_answer_is_kept():
    answer_cache.keep("question", {"faults": [[]]})
    assert answer_cache.find("question") == {"faults": [[]]}


def test_another_question_has_no_answer():
    answer_cache.keep("question", {"faults": []})
    assert answer_cache.find("another") is None


def test_another_environment_of_vllm_has_no_answer(monkeypatch):
    answer_cache.keep("question", {"faults": []})
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert answer_cache.find("question") is None


def test_a_user_without_a_home_asks_each_time(monkeypatch, patched):
    """As one of a container whose number no file names."""

    def unknown(user: int):
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    patched("pwd.getpwuid", unknown)
    answer_cache.keep("question", {"faults": []})
    assert answer_cache.find("question") is None


def test_an_answer_with_a_secret_is_not_kept():
    answer_cache.keep("question", {"kwargs": {"hf_token": "hf_1"}})
    assert answer_cache.find("question") is None


def test_a_cache_folder_that_cannot_be_made_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    answer_cache.keep("question", {"faults": []})
    assert answer_cache.find("question") is None


def test_python_objects_travel_as_marks():
    sent = json.loads(to_json({"logits_processors": [LLMConfig], "max_model_len": 5}))
    assert is_opaque(sent["logits_processors"])
    assert not is_opaque(sent["max_model_len"])


@pytest.mark.skipif(find_spec("triton") is None, reason="only Triton reports what was not freed")
def test_a_program_that_imported_vllm_ends_without_a_report_of_leaks():
    code = (
        "from penstock.engines.vllm.core.imports import uncollected\n"
        "with uncollected():\n"
        "    import triton._C.libtriton"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
