"""What `import penstock` gives, and how little it takes."""

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock

ROOT = Path(__file__).parent.parent.parent


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert penstock.__version__ == project["version"]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import penstock", "ray pydantic vllm torch"),
        ("import penstock.serve", "ray pydantic vllm torch"),
        ("import penstock.data", "ray pydantic vllm torch"),
        ("import penstock.cli.app", "ray pydantic penstock.config"),
        ("import penstock.config", "ray vllm torch"),
        ("import penstock.engines.vllm.arguments.check", "ray vllm torch"),
        ("import penstock.cli.version as one; one.versions()", "ray vllm torch"),
    ],
)
def test_what_takes_seconds_is_not_imported_before_it_is_needed(code: str, heavy: str) -> None:
    code = f"import sys; {code}; print(*{{*{heavy.split()}}} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.split() == []


def test_demo_model_is_a_folder_of_the_package() -> None:
    folder = Path(penstock.demo_model())
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in folder.iterdir()
    }


def test_libraries_whose_insides_are_used_are_held_to_the_versions_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for name in ("ray", "uvicorn"):  # vLLM's insides are compared when an engine starts: see capabilities
        found = [one for one in map(Requirement, wanted) if one.name == name]
        assert found
        assert all({each.operator for each in one.specifier} & {"==", "<", "~="} for one in found), name
