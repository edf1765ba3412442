"""The user's own steps around the preparation of a node: their order, what they can change, how they fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.engines.callback import CallbackBase, problems
from penstock.engines.prepared import prepared
from penstock.errors import EngineStartFailed
from penstock.serve import LLMServer, build_openai_app

pytestmark = pytest.mark.parity("S9")

WEIGHTS = b"\x02\0\0\0\0\0\0\0{}"
"""A safetensors file without a tensor."""


class Recording(CallbackBase):
    """Notes its steps, and the phases of the start between them."""

    seen: list[str] = []  # noqa: RUF012 - what a test reads afterwards

    async def on_before_node_init(self) -> None:
        self.seen.append(f"before {self.llm_config.model_id}")
        os.environ["SET_BY_A_CALLBACK"] = self.kwargs.get("value", "")

    def on_before_download_model_files_distributed(self) -> None:
        self.seen.append("before download")

    async def on_after_node_init(self) -> None:
        self.seen.append("after")


class Elsewhere(Recording):
    """The model is in a folder that only this node knows, and of it only some files are wanted."""

    def on_before_node_init(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.ctx.model_source = f"local://{self.kwargs['folder']}"
        self.ctx.model_files = ["*.json"]


class Unprepared(Recording):
    def on_before_download_model_files_distributed(self) -> None:
        raise AssertionError("nothing is downloaded")

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class Failing(CallbackBase):
    def on_after_node_init(self) -> None:
        raise OSError("the disk is not mounted")


class Picky(CallbackBase):
    def __init__(self) -> None:
        """Takes nothing, although it is given something."""


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(Recording, "seen", [])
    monkeypatch.setenv("SET_BY_A_CALLBACK", "")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return Recording.seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(WEIGHTS)
    return tmp_path / "model"


def config(callback: Any, source: str = "demo", raising: bool = True, **kwargs: Any) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "m", "model_source": source},
        llm_engine="sim",
        callback_config={
            "callback_class": callback,
            "callback_kwargs": kwargs,
            "raise_error_on_callback": raising,
        },
    )


async def test_steps_run_before_the_engine_in_their_order(seen: list[str]):
    server = LLMServer.sync_init(config(Recording, value="1"))
    await server.engine.start(seen.append)
    await server.stop()
    assert seen == ["before m", "after", "load", "warm up"]
    assert os.environ["SET_BY_A_CALLBACK"] == "1"


async def test_the_download_stands_between_the_steps(seen: list[str], folder: Path):
    ready = await prepared(config(Recording, f"local://{folder}"), seen.append)
    assert seen == ["before m", "before download", "download", "after"]
    assert (Path(ready.model_source) / "model.safetensors").read_bytes() == WEIGHTS


async def test_a_step_can_choose_source_and_files(folder: Path):
    ready = await prepared(config(Elsewhere, "org/model", folder=str(folder)), lambda phase: None)
    assert os.listdir(ready.model_source) == ["config.json"]


async def test_a_step_can_leave_the_download_out(seen: list[str]):
    ready = await prepared(config(Unprepared, "s3://nowhere/m"), seen.append)
    assert ready.model_source == "s3://nowhere/m"
    assert seen == ["after"]


async def test_a_failing_step_stops_the_start_with_its_reason():
    with pytest.raises(EngineStartFailed) as caught:
        await LLMServer(config(Failing))
    assert str(caught.value) == (
        "Model 'm' cannot start: its callback Failing.on_after_node_init failed: "
        "OSError: the disk is not mounted."
    )


async def test_a_failing_step_is_only_logged_where_that_is_wanted(caplog: pytest.LogCaptureFixture):
    server = await LLMServer(config(Failing, raising=False))
    await server.check_health()
    await server.stop()
    assert "the disk is not mounted" in caplog.text


async def test_a_class_that_cannot_be_made_is_told():
    with pytest.raises(
        EngineStartFailed, match=r"its callback Picky cannot be made: TypeError: .*llm_config"
    ):
        await LLMServer(config(Picky))


def test_another_class_is_a_mistake_of_the_config():
    assert problems(config(Path))[0].endswith(
        "'Path' cannot be had: TypeError: it is no subclass of penstock.serve.CallbackBase."
    )


def test_a_path_that_cannot_be_imported_is_a_mistake_of_the_config():
    (told,) = problems(config("no_such_module:Callback"))
    assert "'no_such_module:Callback' cannot be had: ModuleNotFoundError" in told
    with pytest.raises(ValueError, match="no_such_module"):
        build_openai_app({"llm_configs": [config("no_such_module.Callback")]})
