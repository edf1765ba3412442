"""Aliases and fallbacks in configs: names that are taken, unknown, or go in a circle are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.models.faults import faults
from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.config import LLMConfig
from penstock.config.derive import names
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("X22")


def model(
    model_id: str, *, aliases: list[str] | None = None, fallbacks: list[str] | None = None
) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        aliases=aliases or [],
        fallbacks=fallbacks or [],
    )


def test_names_that_fit_are_no_problem():
    configs = [
        model("a", aliases=["x", "y"], fallbacks=["b", "z"]),
        model("b", fallbacks=["c"]),
        model("c", aliases=["z"]),
    ]
    assert names.problems(configs) == []


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ([model("a", aliases=["b"]), model("b")], "aliases: 'b' is already a name of 'b'"),
        ([model("a", aliases=["x"]), model("b", aliases=["x"])], "'x' is already a name of 'a'"),
        ([model("a", aliases=["a"])], "'a' is already a name of 'a'"),
        ([model("qwen", fallbacks=["lama"]), model("llama")], "unknown model 'lama'; did you mean 'llama'?"),
        ([model("a", fallbacks=["a"])], "goes in a circle: 'a' -> 'a'"),
        (
            [model("m.1"), model("m_1")],
            "model_id: 'm_1' and 'm.1' would both be Ray Serve's deployment 'LLMServer:m_1'; rename one.",
        ),
        (
            [
                model("a", fallbacks=["b"]),
                model("b", fallbacks=["x"]),
                model("c", aliases=["x"], fallbacks=["a"]),
            ],
            "goes in a circle: 'a' -> 'b' -> 'c' -> 'a'",
        ),
    ],
)
def test_names_that_do_not_fit_are_one_sentence_each(configs: list[LLMConfig], says: str):
    (problem,) = names.problems(configs)
    assert says in problem


def test_the_order_of_fallbacks_is_each_with_its_own_behind_it():
    asked = {"a": ([], ["b", "c"]), "b": ([], ["x"]), "c": ([], []), "d": (["x"], ["c"])}
    assert names.fallbacks(asked)["a"] == ("b", "d", "c")


def test_the_command_and_check_refuse_them_when_they_read_the_file(tmp_path: Path):
    file = tmp_path / "models.yaml"
    file.write_text("model_loading_config: {model_id: m}\nllm_engine: sim\nfallbacks: [other]\n")
    with pytest.raises(ConfigError, match=r"models.yaml:3: fallbacks: unknown model 'other'. Known: m"):
        make_plan(Arguments(sources=(str(file),)))
    _, problems, _ = faults([str(file)])
    assert len(problems) == 1
    assert "unknown model 'other'" in problems[0]


def test_a_fallback_may_be_in_another_file(tmp_path: Path):
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file, more in zip(files, ("fallbacks: [b]", "aliases: [gpt-4o]"), strict=True):
        file.write_text(f"model_loading_config: {{model_id: {file.stem}}}\nllm_engine: sim\n{more}\n")
    configs = make_plan(Arguments(sources=tuple(map(str, files)))).configs
    assert [config.fallbacks + config.aliases for config in configs] == [["b"], ["gpt-4o"]]


def test_a_name_given_twice_is_refused():
    with pytest.raises(ConfigError, match="aliases: names 'x' more than once"):
        model("a", aliases=["x", "x"])
