"""Models of a hub, by the hub's own client, from a local server that speaks its API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from checkpoint import write_llama
from hub import TOKEN, Hub, hub_server

from penstock import sources
from penstock.cli.models.check import check
from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources.hub import use_fast_transfers

pytestmark = pytest.mark.parity("S10")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With `org/open` and the gated `org/gated`."""
    folder = tmp_path / "repository"
    for name, text in {
        "config.json": "{}",
        "model.safetensors": "w" * 5000,
        "pytorch_model.bin": "w" * 5000,
        "adapters/a/adapter_config.json": "{}",
        "adapters/b/adapter_config.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server({"org/open": folder, "org/gated": folder}, gated={"org/gated"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_repository_is_downloaded_once_without_second_formats(hub: Hub):
    folder = sources.fetch("org/open", only=sources.model_files)
    assert {"config.json", "model.safetensors"} <= set(names(folder))
    assert "pytorch_model.bin" not in names(folder)
    hub.asked.clear()
    assert sources.fetch("hf://org/open", only=sources.model_files) == folder
    assert not any("/resolve/" in line for line in hub.asked)


def test_progress_counts_bytes_up_to_the_whole(hub: Hub):
    seen: list[tuple[int, int]] = []
    sources.fetch("org/open", only=["*.safetensors"], watch=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5000, 5000)


def test_a_folder_of_a_repository_is_a_source(hub: Hub):
    assert sources.children("org/open/adapters", "adapter_config.json") == ["a", "b"]
    assert names(sources.fetch("org/open/adapters/a")) == ["adapter_config.json"]


def test_files_from_elsewhere_go_beside_those_of_a_repository(hub: Hub, tmp_path: Path):
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    extra = [(str(tmp_path / "template.jinja"), "template.jinja"), ("org/open/adapters/a", "first")]
    folder = sources.fetch("org/open/adapters", extra)
    first = "first/adapter_config.json"
    assert names(folder) == ["a/adapter_config.json", "b/adapter_config.json", first, "template.jinja"]
    assert (folder / first).read_text() == "{}"


def test_a_new_commit_changes_the_stamp_and_the_folder(hub: Hub):
    before, first = sources.version_of("org/open"), sources.fetch("org/open")
    (hub.repositories["org/open"] / "config.json").write_text("[]")
    assert sources.version_of("org/open") != before
    second = sources.fetch("org/open")
    assert (first / "config.json").read_text() == "{}"
    assert (second / "config.json").read_text() == "[]"


@pytest.mark.parity("S6")
def test_a_gated_repository_wants_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DownloadFailed, match="'org/gated' cannot be read: the repository is gated: accept"):
        sources.fetch("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(DownloadFailed, match="is gated") as caught:
        sources.fetch("org/gated")
    assert "hf_another" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "config.json" in names(sources.fetch("org/gated"))


def test_a_repository_that_is_not_there_is_named(hub: Hub):
    with pytest.raises(SourceNotFound, match="'org/nothing' was not found: the hub has no such repository"):
        sources.fetch("org/nothing")


def test_without_the_hub_what_its_cache_has_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    folder = sources.fetch("org/open")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of "discard": nobody listens
    assert sources.fetch("org/open", tries=1) == folder
    with pytest.raises(DownloadFailed, match="the server cannot be reached"):
        sources.fetch("org/gated", tries=1)


@pytest.mark.parity("S6")
def test_the_former_switch_of_fast_downloads_means_todays(caplog: pytest.LogCaptureFixture):
    environment = {"HF_HUB_ENABLE_HF_TRANSFER": "1"}
    with caplog.at_level(logging.INFO):
        use_fast_transfers(environment)
    assert environment == {"HF_XET_HIGH_PERFORMANCE": "1"}
    assert "HF_HUB_ENABLE_HF_TRANSFER has no effect in today's hub client" in caplog.text


@pytest.mark.parity("X11")
def test_a_check_of_a_hub_id_downloads_no_weights(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    hub.repositories["org/llama"] = write_llama(tmp_path / "llama", **small)
    assert check(["org/llama"], ["--max-model-len", "8192"], gpu="L4") == 0
    assert " MiB, about\n" in capsys.readouterr().out
    assert not any(line.endswith(".safetensors") for line in hub.asked)
    assert check(["org/gated"], gpu="L4") == 2
    assert "the repository is gated: accept its terms on the hub, and set HF_TOKEN" in capsys.readouterr().err
    assert check(["org/lama"], gpu="L4") == 2
    assert "the hub has no such repository" in capsys.readouterr().err
