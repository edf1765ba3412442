"""One check for configs of all engines."""

import pytest

from penstock.config import LLMConfig
from penstock.engines.check import check_arguments

pytestmark = pytest.mark.parity("S2")


def sim(model_id="m", **engine_kwargs) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": model_id}, llm_engine="sim", engine_kwargs=engine_kwargs
    )


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("PENSTOCK_ENGINE_CLS", raising=False)


def test_right_arguments_of_the_simulator_are_no_problem():
    assert check_arguments([sim(max_model_len=128)]).problems == ()


def test_wrong_arguments_of_the_simulator_are_told_for_every_model():
    problems = check_arguments([sim("a", max_modl_len=128), sim("b", step_base_ms=-1)]).problems
    assert problems[0].startswith(
        "model 'a': engine_kwargs.max_modl_len: unknown key 'max_modl_len'; did you mean"
    )
    assert problems[1] == "model 'b': engine_kwargs.step_base_ms: is -1; must be at least 0."


def test_another_engines_arguments_are_its_own(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ENGINE_CLS", "my.engines:Mine")
    findings = check_arguments([sim(anything=1)])
    assert findings.problems == ()
    assert "PENSTOCK_ENGINE_CLS" in findings.notices[0]
