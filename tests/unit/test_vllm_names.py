"""The names of vLLM's arguments as its source says them, beside what vLLM itself takes."""

from __future__ import annotations

import sys

import pytest

from penstock.config import LLMConfig
from penstock.engines.vllm.arguments import names
from penstock.engines.vllm.arguments.refused import REFUSED


def config(**engine_kwargs: object) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "m"}, engine_kwargs=engine_kwargs)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-model-len",
        "--max_model_len=5",
        "--max-model-l",  # argparse takes what only one flag begins with
        "--no-enable-prefix-caching",
        "--compilation-config.mode",
        "--cudagraph-capture-sizes",
        "--tool-call-parser",
        "--config",
    ],
)
def test_what_vllm_may_take_is_left_to_it(flag: str):
    assert names.unknown_flags([flag, "value"]) == []


def test_unknown_flags_are_named_with_the_nearest():
    (told,) = names.unknown_flags(["--max-modl-len", "5", "--seed", "1"])
    assert "did you mean '--max-model-len'" in told


def test_unknown_and_refused_keys_are_named_with_their_place():
    unknown, refused = names.unknown_arguments([config(max_modl_len=1, max_model_len=1, port=1)])
    assert unknown.startswith("model 'm': engine_kwargs.max_modl_len: unknown vLLM argument")
    assert refused == f"model 'm': engine_kwargs.port: {REFUSED['port']}"


def test_a_source_that_cannot_be_read_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    names.known.cache_clear()
    try:
        assert names.unknown_flags(["--max-modl-len"]) == []
        assert names.unknown_arguments([config(max_modl_len=1)]) == []
    finally:
        names.known.cache_clear()
