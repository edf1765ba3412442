"""Adapters in a bucket of Google's, from a local server that speaks its API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from gcs import gcs_server

from penstock import sources
from penstock.data.storage.paths import storage_path
from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources import bucket as bucket_module

pytestmark = pytest.mark.parity("S10", "S21")

WEIGHTS = bytes(range(256)) * 8000


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`gs://models`, with two adapters below `of`."""
    for name in ("poet", "clerk"):
        (tmp_path / "models" / "of" / name).mkdir(parents=True)
        (tmp_path / "models" / "of" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "models" / "of" / "poet" / "adapter_model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with gcs_server(tmp_path) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield tmp_path / "models"


def test_a_folder_comes_whole_and_its_change_is_seen(bucket: Path):
    folder = sources.fetch("gs://models/of/poet")
    assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "adapter_config.json").read_text() == "{}"
    before = sources.version_of("gs://models/of/poet")
    (bucket / "of" / "poet" / "adapter_config.json").write_text("[1]")
    assert sources.version_of("gs://models/of/poet") != before


def test_folders_with_a_file_are_listed(bucket: Path):
    (bucket / "of" / "notes").mkdir()
    (bucket / "of" / "notes" / "README.md").touch()
    assert sources.children("gs://models/of", "adapter_config.json") == ["clerk", "poet"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("gs://nowhere/m", "there is no such bucket"), ("gs://models/other", "it holds no files")],
)
def test_what_is_not_there_is_named(source: str, said: str):
    with pytest.raises(SourceNotFound, match=f"'{source}' was not found: {said}"):
        sources.fetch(source)


def test_a_server_that_is_down_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_module, "_GCS_RETRY", timedelta(seconds=0.1))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")  # the port of "discard"
    with pytest.raises(DownloadFailed, match="cannot be read: the server cannot be reached"):
        sources.fetch("gs://models/of/clerk", tries=1)


def test_one_file_is_read_by_both_names_of_a_bucket():
    assert storage_path("gs://models/of/poet/adapter_config.json").read() == b"{}"
    assert storage_path("gcs://models/of/poet/adapter_config.json").read() == b"{}"
