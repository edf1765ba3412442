"""Folders and fsspec URLs become folders on this node, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from penstock import sources
from penstock.data.storage.paths import storage_path
from penstock.errors import DownloadFailed, SourceNotFound, Unavailable
from penstock.sources import bucket, every_node, failures


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def adapters() -> Iterator[str]:
    """A folder in fsspec's memory with adapters `a` and `b`."""
    memory = fsspec.filesystem("memory")
    for name in ("a", "b"):
        memory.pipe_file(f"/adapters/{name}/adapter_config.json", b"{}")
        memory.pipe_file(f"/adapters/{name}/weights/part.bin", name.encode() * 1000)
    yield "memory://adapters"
    memory.rm("/adapters", recursive=True)


def contents(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def test_a_local_folder_is_used_as_it_is(tmp_path: Path, cache: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert sources.fetch(str(tmp_path / "model")) == tmp_path / "model"
    assert sources.fetch(f"file://{tmp_path}/model") == tmp_path / "model"
    assert not cache.exists()


def test_a_url_is_downloaded_once(adapters: str):
    first = sources.fetch(f"{adapters}/a")
    assert contents(first) == {"adapter_config.json": 2, "weights/part.bin": 1000}
    touched = (first / "adapter_config.json").stat().st_mtime_ns
    assert sources.fetch(f"{adapters}/a") == first
    assert (first / "adapter_config.json").stat().st_mtime_ns == touched


def test_on_other_nodes_a_fetch_finds_the_same_version_or_fails(adapters: str):
    found: list[object] = []

    def begin(fetch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], list[Any]]:
        return lambda: [fetch.__wrapped__(*args, **kwargs), *found]

    every_node.use(begin)
    try:
        folder, version = sources.fetch_with_version(f"{adapters}/a", tries=1)
        assert folder.name == version
        found.append((folder, "another version"))
        with pytest.raises(DownloadFailed, match="changed while several nodes downloaded it"):
            sources.fetch_with_version(f"{adapters}/a", tries=1)
    finally:
        every_node.leave(begin)


def test_a_changed_file_changes_the_stamp_and_the_folder(adapters: str):
    before, first = sources.version_of(f"{adapters}/a"), sources.fetch(f"{adapters}/a")
    assert sources.version_of(f"{adapters}/a") == before
    fsspec.filesystem("memory").pipe_file("/adapters/a/adapter_config.json", b"[]")
    assert sources.version_of(f"{adapters}/a") != before
    second = sources.fetch(f"{adapters}/a")
    assert second != first
    assert (first / "adapter_config.json").read_text() == "{}"
    assert (second / "adapter_config.json").read_text() == "[]"


def test_a_changed_local_file_changes_the_stamp(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    before = sources.version_of(str(tmp_path))
    (tmp_path / "new.json").write_text("[]")
    (tmp_path / "new.json").rename(tmp_path / "config.json")
    assert sources.version_of(str(tmp_path)) != before


def test_children_are_the_folders_directly_below_that_hold_the_file(adapters: str, tmp_path: Path):
    for folder in ("x/y", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "x/file", "x/y/file"):
        (tmp_path / file).touch()
    assert sources.children(adapters, "adapter_config.json") == ["a", "b"]
    assert sources.children(str(tmp_path), "file") == ["x"]


def test_only_wanted_files_are_fetched(adapters: str):
    assert set(contents(sources.fetch(f"{adapters}/a", only=["*.bin"]))) == {"weights/part.bin"}
    with pytest.raises(SourceNotFound, match="none of the files that are wanted"):
        sources.fetch(f"{adapters}/a", only=["*.safetensors"])


def test_extra_files_come_from_elsewhere(adapters: str, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    extra = [(str(tmp_path / "tokenizer.json"), "tokenizer.json"), (f"{adapters}/b/weights", "more")]
    assert set(contents(sources.fetch(f"{adapters}/a", extra))) == {
        "adapter_config.json",
        "weights/part.bin",
        "tokenizer.json",
        "more/part.bin",
    }


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "memory://adapters/nowhere",
            "'memory://adapters/nowhere' was not found: there is no such file or folder.",
        ),
        ("/no/such/folder", "'/no/such/folder' does not exist on this node"),
        ("./no-such-folder", "'./no-such-folder' does not exist on this node"),
        ("nosuch://user:secret@host/x", "'nosuch://host/x' cannot be read: Protocol not known: nosuch"),
        ("abfs://container/model", "'abfs://container/model' cannot be read: Install adlfs"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, said: str):
    with pytest.raises(SourceNotFound) as caught:
        sources.fetch(source)
    assert str(caught.value).startswith(said)


def test_progress_counts_to_the_whole_and_can_end_the_download(adapters: str):
    seen: list[tuple[int, int]] = []
    sources.fetch(f"{adapters}/a", watch=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1002, 1002)

    def enough(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.fetch(f"{adapters}/b", watch=enough)
    assert set(contents(sources.fetch(f"{adapters}/b"))) == {"adapter_config.json", "weights/part.bin"}


def test_a_time_limit_ends_the_download(adapters: str):
    with pytest.raises(DownloadFailed, match="was not finished in time"):
        sources.fetch(f"{adapters}/a", timeout_s=-1)


def test_a_folder_that_cannot_be_written_is_named(adapters: str, cache: Path):
    cache.write_text("a file where the cache should be")
    with pytest.raises(DownloadFailed, match=f"cannot be put into {cache}"):
        sources.fetch(f"{adapters}/a")


def test_former_versions_go_when_nobody_uses_them(adapters: str):
    former = []
    for text in (b"1", b"22", b"333"):
        fsspec.filesystem("memory").pipe_file("/adapters/a/adapter_config.json", text)
        former.append(sources.fetch(f"{adapters}/a"))
    held, free, _ = former
    sources.pin(held)
    long_ago = time.time() - 3600
    for folder in (held, free):
        os.utime(folder, (long_ago, long_ago))
    fsspec.filesystem("memory").pipe_file("/adapters/a/adapter_config.json", b"4444")
    sources.fetch(f"{adapters}/a")
    assert held.exists()
    assert not free.exists()


DOWNLOADER = """
import sys
from penstock import sources
def watch(done, total):
    print("downloading", flush=True)
    sys.stdin.read(1)
print(sources.fetch(sys.argv[1], watch=watch), flush=True)
"""


def test_a_killed_downloader_leaves_neither_lock_nor_half_a_folder(tmp_path: Path, cache: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(bytes(1 << 20))
    source = f"local://{tmp_path}/a"  # fsspec's own name for this machine: copied, as any other URL
    process = subprocess.Popen(
        [sys.executable, "-c", DOWNLOADER, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout
        assert process.stdout.readline() == "downloading\n"
        assert [path for path in cache.glob("sources/*/*") if path.is_dir() and path.suffix == ""] == []
        process.kill()
    assert contents(sources.fetch(source, timeout_s=60)) == {"big": 1 << 20}


@pytest.mark.parametrize(
    ("error", "said", "passing"),
    [
        (OSError("AWS Error ACCESS_DENIED during ListObjectsV2 operation"), "access is denied", False),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation"), "no such bucket", False),
        (OSError("AWS Error NETWORK_CONNECTION during HeadObject: curlCode: 7, Could not connect"),
         "cannot be reached", True),
        (OSError(28, "No space left on device"), "no space left", False),
        (PermissionError(13, "Permission denied", "/models/a"), "no permission for /models/a", False),
        (ConnectionResetError(104, "Connection reset by peer"), "connection was lost", True),
        (TimeoutError(), "did not answer in time", True),
    ],
)  # fmt: skip
def test_errors_of_clients_are_told_apart(error: Exception, said: str, passing: bool):
    told = failures.classify(error)
    assert said in told.why
    assert told.retryable == passing


def test_weights_come_in_one_format():
    names = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "tf_model.h5",
        "onnx/model.onnx",
        "._model.safetensors",
        "t.json",
    ]
    assert sources.model_files(names) == ["config.json", "model.safetensors", "t.json"]
    assert "pytorch_model.bin" in sources.model_files(["config.json", "pytorch_model.bin"])


def test_a_version_appears_when_all_of_it_is_on_the_disk(adapters: str, patched):
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    patched(os, "fsync", noted)
    folder = sources.fetch(adapters)
    below = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    assert {f"{folder}.partial/{name}" for name in below} | {f"{folder}.partial"} <= set(synced)
    assert synced[-1] == str(folder.parent)


def test_only_files_that_end_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    assert storage_path(tmp_path / "file").read() == b"x"
    for source in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(SourceNotFound):
            storage_path(source).read()


def test_everything_that_is_read_is_tried_again_after_the_same_pauses(patched):
    pauses: list[float] = []

    def lost(*args: object, **options: object) -> None:
        raise ConnectionError

    patched(time, "sleep", pauses.append)
    patched(type(fsspec.filesystem("memory")), "_open", lost)
    patched(type(fsspec.filesystem("memory")), "isfile", lambda *args: True)
    with pytest.raises(Unavailable, match="tries: the connection was lost"):
        storage_path("memory://away").read()
    assert pauses == [0.5, 1.0, 2.0]


def test_another_region_in_the_environment_makes_another_client(monkeypatch: pytest.MonkeyPatch):
    for name in bucket.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for region in ("eu-west-1", "us-west-2"):
        monkeypatch.setenv("AWS_REGION", region)
        assert bucket.client("s3", "models").region == region
