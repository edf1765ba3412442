"""`WatchedFiles`: a file is saved when it has changed and no longer does, whatever an editor does to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.cli.serve import startup
from penstock.config.loading.watched_files import WatchedFiles
from penstock.errors import ConfigError, Unavailable
from penstock.serve import fleet_file

MODEL = "model_loading_config: {{model_id: {0}}}\nllm_engine: sim\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[WatchedFiles, Path, Path]:
    """The watch of a fleet, its file, and the file of its model."""
    fleet, model = tmp_path / "fleet.yaml", tmp_path / "model.yaml"
    model.write_text(MODEL.format("a"))
    fleet.write_text("llm_configs: [model.yaml]\n")
    watch = WatchedFiles([str(fleet)])
    assert not watch.saved()
    assert not watch.saved()
    return watch, fleet, model


def test_it_is_saved_once_when_it_no_longer_changes(files: tuple[WatchedFiles, Path, Path]):
    watch, fleet, model = files
    for text in ("", "longer", MODEL.format("b")):
        model.write_text(text)
        assert not watch.saved()
    assert [watch.saved(), watch.saved()] == [True, False]
    fleet.with_suffix(".new").write_text("llm_configs: [model.yaml]\n# more\n")
    fleet.with_suffix(".new").rename(fleet)
    assert [watch.saved(), watch.saved(), watch.saved()] == [False, True, False]


def test_a_file_that_is_gone_is_told_once_and_waited_for(files: tuple[WatchedFiles, Path, Path]):
    watch, fleet, model = files
    fleet.unlink()
    assert [watch.saved(), watch.saved(), watch.saved()] == [False, True, False]
    with pytest.raises(ConfigError, match="no such file"):
        make_plan(Arguments(sources=(str(fleet),), watch=True))
    fleet.write_text("llm_configs: [model.yaml, other.yaml]\n")
    other = model.with_name("other.yaml")
    other.write_text(MODEL.format("other"))
    assert [watch.saved(), watch.saved()] == [False, True]
    watch.look()
    other.write_text(MODEL.format("renamed"))
    assert [watch.saved(), watch.saved()] == [False, True]


def test_a_config_map_is_saved_when_its_link_is_swapped(tmp_path: Path):
    """As a kubelet does it: files are links to below `..data`, a link to a folder of its own each time."""

    def project(folder: str, model: str) -> None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "fleet.yaml").write_text("llm_configs: [model.yaml]\n")
        (tmp_path / folder / "model.yaml").write_text(MODEL.format(model))
        (tmp_path / "..data_tmp").symlink_to(folder)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    project("..2026_11_28", "a")
    for name in ("fleet.yaml", "model.yaml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    arguments = Arguments(sources=(str(tmp_path / "fleet.yaml"),))
    watch = WatchedFiles(arguments.sources)
    for number, model in enumerate(("b", "c")):  # of the same length, and perhaps of the same time
        assert [watch.saved(), watch.saved()] == [False, False]
        project(f"..2026_11_29_{number}", model)
        assert [watch.saved(), watch.saved()] == [False, True]
        watch.look()
        assert make_plan(arguments).configs[0].model_id == model


def watched(
    monkeypatch: pytest.MonkeyPatch, fleet: Path, started: Callable[[], object], said: Callable[[str], object]
) -> list[str]:
    """The models of the first fleet that a service applies. started: called while its first one starts. said:
    with what the command prints.
    """
    applied: list[str] = []

    def save(_: object, saved: dict[str, Any], _again: bool) -> str:
        applied.extend(one["model_loading_config"]["model_id"] for one in saved["llm_configs"])
        steps.stop()
        return ""

    def report(event: object) -> None:
        assert isinstance(event, startup.Note)
        said(event.text)

    arguments = Arguments(sources=(str(fleet),), watch=True)
    steps = startup.Steps(make_plan(arguments), arguments, report)
    started()
    monkeypatch.setattr(fleet_file.Control, "save", save)
    monkeypatch.setattr(fleet_file, "_LOOK_S", 0.01)
    limit = threading.Timer(60, steps.stop)
    limit.start()
    steps._watch(steps._files)
    limit.cancel()
    return applied


def test_what_is_saved_while_the_first_model_starts_is_applied(
    files: tuple[WatchedFiles, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    _, fleet, model = files
    assert watched(monkeypatch, fleet, lambda: model.write_text(MODEL.format("b")), print) == ["b"]


def test_a_file_that_was_missing_or_faulty_is_watched(
    files: tuple[WatchedFiles, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    _, fleet, model = files
    other, texts = model.with_name("other.yaml"), ["model_loading_config: 7", MODEL.format("other")]
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        other.write_text(texts.pop(0))

    def begin() -> None:
        fleet.write_text("llm_configs: [model.yaml, other.yaml]\n")

    assert watched(monkeypatch, fleet, begin, say) == ["a", "other"]
    assert "no such file" in said[0]
    assert "other.yaml:1" in said[1]


def test_a_save_that_control_does_not_answer_is_made_again(
    files: tuple[WatchedFiles, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fleet_file, "_ASK_AGAIN_S", 0.1)
    watch, _, model = files
    stopped, said, answers = (
        threading.Event(),
        list[str](),
        [Unavailable("Busy."), Unavailable("Busy."), None],
    )
    may_have_it: list[bool] = []

    def save(_: object, again: bool) -> str:
        may_have_it.append(again)
        if (error := answers.pop(0)) is not None:
            raise error
        stopped.set()
        return "Applied."

    model.write_text(MODEL.format("b"))
    fleet_file.follow(watch, dict[str, Any], save, said.append, stopped)
    assert (answers, said) == ([], ["Busy. It is asked again.", "Applied."])
    assert may_have_it == [False, True, True]


def test_a_service_ends_while_control_has_not_answered_a_save(
    files: tuple[WatchedFiles, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    _, fleet, model = files
    asked, answer, ended = threading.Event(), threading.Event(), threading.Event()

    def save(_: object, _saved: object, _again: bool) -> str:
        asked.set()
        answer.wait(60)
        return ""

    def report(event: object) -> None:
        if isinstance(event, startup.Stopped):
            ended.set()

    monkeypatch.setattr(fleet_file, "_LOOK_S", 0.01)
    monkeypatch.setattr(fleet_file.Control, "save", save)
    for name in ("_deploy", "_wait_until_serving"):
        monkeypatch.setattr(startup.Steps, name, lambda *_: None)
    cluster = SimpleNamespace(own=False, start_serve=lambda _: None, leave=lambda: None)
    monkeypatch.setattr(startup, "Cluster", lambda *_, **__: cluster)
    arguments = Arguments(sources=(str(fleet),), watch=True)
    steps = startup.Steps(make_plan(arguments), arguments, report)
    model.write_text(MODEL.format("b"))
    steps.begin()
    assert asked.wait(60)
    steps.stop()
    assert ended.wait(60)
    assert not answer.is_set()
    answer.set()


@pytest.mark.parametrize("missing", ["typo.yaml", '"model.yaml\\0"'], ids=["typo", "no name for a file"])
def test_a_missing_file_hides_no_other_change(files: tuple[WatchedFiles, Path, Path], missing: str):
    watch, fleet, _ = files
    for names in (f"{missing}, model.yaml", "model.yaml"):
        fleet.write_text(f"llm_configs: [{names}]\n")
        assert [watch.saved(), watch.saved(), watch.saved()] == [False, True, False]
        watch.look()


def test_a_fault_in_reading_a_file_ends_nothing(
    files: tuple[WatchedFiles, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    watch, _, model = files
    monkeypatch.setattr(fleet_file, "_LOOK_S", 0.01)
    stopped, said, faults = threading.Event(), list[str](), [KeyError("x"), None]

    def read() -> dict[str, Any]:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return {}

    def say(text: str) -> None:
        said.append(text)
        model.write_text(MODEL.format("fixed"))

    def save(_: object, _again: bool) -> str:
        stopped.set()
        return ""

    model.write_text(MODEL.format("b"))
    fleet_file.follow(watch, read, save, say, stopped)
    assert (faults, said) == ([], ["Nothing changes: A fault of Penstock itself (KeyError: 'x')."])


def test_a_model_alone_cannot_be_watched():
    with pytest.raises(ConfigError, match="--watch needs a config file"):
        make_plan(Arguments(sources=("./my-model",), watch=True))
