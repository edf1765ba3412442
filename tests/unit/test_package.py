"""What `import penstock` gives, and how little it takes."""

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import penstock

ROOT = Path(__file__).parent.parent.parent


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert penstock.__version__ == project["version"]


def test_import_loads_neither_ray_nor_pydantic_nor_an_engine() -> None:
    code = "import penstock, sys; print({'ray', 'pydantic', 'vllm', 'torch'} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.strip() == "set()"


def test_help_of_the_command_needs_no_config() -> None:
    code = "import penstock.cli.app, sys; print({'ray', 'pydantic', 'penstock.config'} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.strip() == "set()"


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
