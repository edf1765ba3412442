"""What Penstock adds to vLLM is on where the installed vLLM fits it, and off by itself elsewhere."""

from __future__ import annotations

import ast
import logging
import shutil
from pathlib import Path

import pytest

from penstock.cli.models.precheck import missing_engine
from penstock.config import LLMConfig
from penstock.config.messages import problems
from penstock.engines import vllm as vllm_engine
from penstock.engines.vllm.arguments.source import PackageSource
from penstock.engines.vllm.capabilities import state, version
from penstock.engines.vllm.capabilities.needs import exactly, fields, has, says, takes
from penstock.engines.vllm.capabilities.state import capabilities, compare
from penstock.engines.vllm.capabilities.table import CAPABILITIES
from penstock.engines.vllm.core.process import READ_BY_IMPORTS
from penstock.errors import ConfigError, EngineStartFailed

CORE = """
from foreign.parts import Base, Output as Result

if True:
    LIMIT = 3

class Core(Base):
    KIND: str = "core"

    def __init__(self, config, *, stats=False, **more):
        self.queue: list = []

    def step(self, request, wave=0): ...

    def both(self, request): ...
"""
PARTS = """
class Base:
    def stop(self): ...

class First:
    ident: int

class Output(First):
    text: str
"""


class Recorded(PackageSource):
    """Remembers what was looked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: set[str] = set()

    def find(self, reference: str) -> ast.AST | None:
        self.asked.add(reference)
        return super().find(reference)

    def fields(self, reference: str) -> list[str] | None:
        self.asked.add(reference)
        return super().fields(reference)

    def knows(self, module: str, name: str) -> bool:
        """Whether the name, or something in it, was looked for; `name` may be a module."""
        inside = (f"{module}:{name}.", f"{module}.{name}:".lstrip("."))
        return any(f"{one}.".startswith(inside) for one in self.asked)


@pytest.fixture
def foreign(tmp_path: Path) -> PackageSource:
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "core.py").write_text(CORE)
    (folder / "parts.py").write_text(PARTS)
    return PackageSource(folder)


@pytest.mark.parametrize(
    "need",
    [
        has("core", "Core LIMIT Result Core.KIND"),
        has("core:Core", "queue stop"),
        takes("core:Core.__init__(config, stats, anything)"),
        takes("core:Core.step(request)"),
        exactly("core:Core.step(request, wave)"),
        exactly("core:Core.step(request)", new="wave"),
        fields("core:Result", "ident text"),
        fields("core:Result", "ident", new="text"),
        says("core", '"core"'),
    ],
)
def test_what_is_there_leaves_no_gap(foreign: PackageSource, need: object):
    assert need(foreign) is None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("need", "gap"),
    [
        (has("core:Core", "step go"), "Core.go is gone"),
        (has("elsewhere", "Core"), "Core is gone"),
        (takes("core:Core.step(request, speed)"), "Core.step does not take speed"),
        (takes("core:Core.step(wave)"), "Core.step requires request"),
        (exactly("core:Core.step(request)"), "Core.step takes (request, wave), not (request)"),
        (fields("core:Result", "ident"), "Result has a new field, text"),
        (fields("core:Result", "ident text kind"), "Result has no kind"),
        (says("core", "READY"), "core does not contain READY"),
    ],
)
def test_what_differs_is_named(foreign: PackageSource, need: object, gap: str):
    assert need(foreign) == gap  # type: ignore[operator]


def test_the_installed_vllm_has_all_that_is_needed():
    assert state.fit() == state.Fit(None, {})


def test_every_import_from_vllm_is_a_need():
    """Without it the import would fail in a version that lacks the name, where a capability should be off."""
    real = PackageSource.installed("vllm")
    assert real is not None
    source = Recorded(real.folder)
    compare(source)
    imported = [
        (file.name, node.module.removeprefix("vllm").removeprefix("."), alias.name)
        for file in Path(vllm_engine.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    ]
    assert [one for one in imported if not source.knows(*one[1:])] == []


def changed(tmp_path: Path, file: str, old: str, new: str) -> PackageSource:
    """The installed vLLM with one file changed."""
    real = PackageSource.installed("vllm")
    assert real is not None
    folder = tmp_path / "vllm"
    shutil.copytree(real.folder, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).unlink()
    (folder / file).write_text(text.replace(old, new))
    return PackageSource(folder)


def test_a_new_field_of_an_output_switches_off_what_delays_outputs(tmp_path: Path):
    field = "    finish_reason: FinishReason | None = None\n"
    drifted = changed(tmp_path, "v1/engine/__init__.py", field, f"{field}    mood: str | None = None\n")
    assert compare(drifted) == state.Fit(None, {"token_groups": "EngineCoreOutput has a new field, mood"})


def test_a_parameter_that_no_plain_row_sets_leaves_rows_as_fast_as_they_are(tmp_path: Path):
    """As vLLM 0.33 has it."""
    last = "        default_template_content_format: ChatTemplateContentFormatOption,\n"
    more = f"{last}        reasoning_effort_map: dict[str, str] | None = None,\n"
    drifted = changed(tmp_path, "entrypoints/openai/chat_completion/protocol.py", last, more)
    assert compare(drifted) == state.Fit(None, {})


def test_all_variables_that_vllm_reads_while_it_is_imported_reach_the_core_before():
    source = PackageSource.installed("vllm")
    assert source is not None
    names = source.find("v1.executor.ray_env_utils:_RAY_WORKER_PRE_IMPORT_ENV_VARS")
    assert isinstance(names, ast.Assign)
    assert isinstance(names.value, ast.Call)
    assert ast.literal_eval(names.value.args[0]) == READ_BY_IMPORTS


def test_without_what_no_engine_can_do_without_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drifted = changed(tmp_path, "entrypoints/launchers/app.py", "def build_app(", "def make_app(")
    monkeypatch.setattr(state, "fit", lambda: compare(drifted))
    with pytest.raises(EngineStartFailed, match=r"build_app is gone.*llm_engine: process"):
        capabilities()


def test_each_stands_on_others_before_it():
    names = list(CAPABILITIES)
    assert all(set(one.on) <= set(names[: names.index(name)]) for name, one in CAPABILITIES.items())


def test_the_environment_switches_off_by_name_with_all_that_stands_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(state.VARIABLE, "lasting_core, fast_stream")
    found = capabilities()
    assert set(found.off) == {"lasting_core", "token_groups", "fast_stream", "fast_stream_beside_tools"}
    assert not found.has("token_groups")
    assert found.has("scheduler_stats")
    with caplog.at_level(logging.WARNING):
        found.report()
    assert "token_groups is off (lasting_core is off): the tokens of non-streaming" in caplog.text


def test_the_environment_switches_all_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(state.VARIABLE, "all")
    assert list(capabilities().off) == list(CAPABILITIES)


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(state.VARIABLE, "fast_strem")
    with pytest.raises(ConfigError, match="unknown capability 'fast_strem'; did you mean 'fast_stream'"):
        capabilities()


@pytest.mark.parametrize("found", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0rc1", "dev", None])
def test_the_window_passes_without_a_word(found: str | None, caplog: pytest.LogCaptureFixture):
    version.check(found)
    assert caplog.text == ""


@pytest.mark.parametrize("found", ["0.29.1", "0.9.2"])
def test_an_older_version_is_refused_with_the_engine_that_takes_any(found: str):
    with pytest.raises(EngineStartFailed, match=rf"vLLM {found} .* 0\.30 and newer.*`llm_engine: process`"):
        version.check(found)


def test_an_older_version_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(version, "OLDEST", (0, 99))
    config = LLMConfig(model_loading_config={"model_id": "m", "model_source": "demo"})
    assert "works with vLLM 0.99 and newer" in (missing_engine(config) or "")


def test_a_newer_version_is_one_warning(caplog: pytest.LogCaptureFixture):
    problems.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):  # vLLM may have raised the root's
        version.check("0.34.0")
        version.check("0.34.0")
    assert caplog.text.count("vLLM 0.34.0 is newer than 0.33") == 1
