"""Where bytes lie: whole files or none, here and in a bucket."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from bucket import s3_server

from penstock.data.storage.paths import RemotePath, atomic_write, storage_path, unfinished_files
from penstock.data.storage.source import expand_glob
from penstock.errors import ConfigError, SourceNotFound, Unavailable


@pytest.fixture(scope="module")
def s3():
    with s3_server("jobs") as server:
        before = dict(os.environ)
        os.environ.update(server.environment)
        yield server
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(params=["here", "s3", "fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path):
    """A folder, an S3 prefix and a URL of fsspec, all empty."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return storage_path(f"s3://jobs/{tmp_path.name}")
    return storage_path(tmp_path) if request.param == "here" else storage_path(f"memory://{tmp_path.name}")


def test_what_is_written_can_be_read(root):
    (root / "a.txt").write(b"one")
    assert (root / "a.txt").read() == b"one"
    with (root / "a.txt").open() as file:
        assert file.read() == b"one"


def test_a_second_write_replaces_the_first(root):
    (root / "a.txt").write(b"one")
    (root / "a.txt").write(b"two")
    assert (root / "a.txt").read() == b"two"


def test_a_large_file_is_there_when_its_block_ends(root):
    with atomic_write(root / "a.txt") as file:
        file.write(b"x" * 3_000_000)
        assert not (root / "a.txt").exists()
    assert (root / "a.txt").files()[0].size_bytes == 3_000_000


def test_a_block_that_raises_leaves_the_old_file(root):
    (root / "a.txt").write(b"old")
    with suppress(RuntimeError), atomic_write(root / "a.txt") as file:
        file.write(b"new")
        raise RuntimeError
    assert (root / "a.txt").read() == b"old"
    assert [file.name for file in root.files()] == ["a.txt"]


def test_files_are_listed_by_name_below_a_folder(root):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (root / name).write(b"x")
    assert [file.name for file in root.files()] == ["a.txt", "b.txt", "deep/c.txt"]


def test_neighbours_have_names_in_the_same_folder(root):
    (root / "a.jsonl").with_added_suffix(".journal").write(b"1")
    (root / "a.jsonl").with_name("b.jsonl").write(b"2")
    assert [file.name for file in root.files()] == ["a.jsonl.journal", "b.jsonl"]


def test_removing_what_is_not_there_does_nothing(root):
    (root / "a.txt").write(b"x")
    (root / "a.txt").remove()
    (root / "a.txt").remove()
    assert not (root / "a.txt").exists()


def test_linked_folders_are_listed_and_cycles_are_not_followed(tmp_path: Path):
    for name in ("in/a/1.jsonl", "elsewhere/2.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/a/up").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in/a")
    assert [file.name for file in storage_path(tmp_path / "in").files()] == [
        "a/1.jsonl",
        "linked/2.jsonl",
        "linked/back/1.jsonl",
    ]


def test_a_glob_finds_files_of_its_ending_only(root):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (root / name).write(b"x")
    assert [where.name for where, _ in expand_glob(f"{root.url}/*.jsonl")] == ["a.jsonl", "b.jsonl"]


def test_a_folder_means_its_files_without_journals_and_marks(root):
    for name in ("a.jsonl", "_SUCCESS", "out.jsonl.journal/0001-driver.jsonl"):
        (root / name).write(b"x")
    assert [where.name for where, _ in expand_glob(root.url)] == ["a.jsonl"]


def test_an_input_that_is_not_there_is_named(root):
    with pytest.raises(SourceNotFound, match=r"no file at '.*nothing\.jsonl'"):
        expand_glob(f"{root.url}/nothing.jsonl")


def test_what_a_kill_left_half_written_can_be_told(tmp_path: Path):
    (tmp_path / ".a.txt.12345678.unfinished").write_bytes(b"x")
    (tmp_path / "a.txt").write_bytes(b"x")
    assert [path.name for path in unfinished_files(storage_path(tmp_path))] == [".a.txt.12345678.unfinished"]


def test_a_scheme_without_a_client_is_one_sentence():
    with pytest.raises(Unavailable, match="cannot be reached"):
        storage_path("nosuchscheme://bucket/x")


def test_credentials_in_a_url_are_not_shown():
    assert "secret" not in storage_path("s3://user:secret@jobs/x").url


def test_a_glob_stays_in_its_folder_and_out_of_journals(root):
    names = ["a.jsonl", "old/b.jsonl", "old/older/c.jsonl", "b.jsonl.journal/0001-driver.jsonl", "_x.jsonl"]
    for name in names:
        (root / name).write(b"x")

    def names_of(pattern: str) -> list[str]:
        return [where.url.removeprefix(f"{root.url}/") for where, _ in expand_glob(f"{root.url}/{pattern}")]

    assert names_of("*.jsonl") == ["a.jsonl"]
    assert names_of("*/*.jsonl") == ["old/b.jsonl"]
    assert names_of("**/*.jsonl") == ["a.jsonl", "old/b.jsonl", "old/older/c.jsonl"]
    assert names_of("old/**") == ["old/b.jsonl", "old/older/c.jsonl"]
    assert names_of("_*.jsonl") == ["_x.jsonl"]
    with pytest.raises(SourceNotFound):
        names_of("*.journal.jsonl")


def test_outputs_of_jobs_are_read_only_by_their_own_names(root):
    names = ["a.jsonl", "out.jsonl", "out.failed.jsonl", "out.errors.jsonl", "out.jsonl.journal/job.json"]
    for name in [
        *names,
        "table/part-00000.csv",
        "table.failed.csv",
        "table.journal/job.json",
        "b.failed.csv",
    ]:
        (root / name).write(b"x")

    def names_of(pattern: str) -> list[str]:
        return [where.url.removeprefix(f"{root.url}/") for where, _ in expand_glob(f"{root.url}{pattern}")]

    assert names_of("") == ["a.jsonl", "b.failed.csv"]
    assert names_of("/*.jsonl") == names_of("/**/*.jsonl") == ["a.jsonl"]
    assert names_of("/*.csv") == ["b.failed.csv"]
    assert names_of("/out.jsonl") == ["out.jsonl"]
    assert names_of("/table/*.csv") == ["table/part-00000.csv"]
    with pytest.raises(SourceNotFound, match="except outputs of jobs"):
        names_of("/out*.jsonl")


def test_a_glob_lists_only_folders_that_it_names(tmp_path: Path, patched):
    listed: list[str] = []
    real = os.scandir
    for name in ("a/1.jsonl", "a/deep/2.jsonl", "b/deeper/still/3.jsonl"):
        (storage_path(tmp_path) / name).write(b"x")
    patched(os, "scandir", lambda at: [listed.append(str(at)), real(at)][1])
    assert [where.name for where, _ in expand_glob(f"{tmp_path}/a/*.jsonl")] == ["1.jsonl"]
    assert listed == [str(tmp_path / "a")]
    assert [where.name for where, _ in expand_glob(f"{tmp_path}/*/*.jsonl")] == ["1.jsonl"]
    assert not [one for one in listed if "deep" in one]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(Unavailable, match="closed' cannot be listed: Permission denied"):
        expand_glob(tmp_path)


def test_a_file_that_vanishes_while_it_is_listed_is_left_out(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"x")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert [where.name for where, _ in expand_glob(tmp_path)] == ["a.jsonl"]


def test_pipes_are_refused_by_a_sentence(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", "pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="reads its input more than once"):
            expand_glob(name)


def test_a_file_with_a_mark_of_globs_in_its_name_means_itself(root):
    for name in ("what?.jsonl", "whats.jsonl", "[a].jsonl", "a.jsonl"):
        (root / name).write(b"x")
    assert [where.name for where, _ in expand_glob(f"{root.url}/what?.jsonl")] == ["what?.jsonl"]
    assert [where.name for where, _ in expand_glob(f"{root.url}/[a].jsonl")] == ["[a].jsonl"]


def test_a_file_url_may_be_quoted(tmp_path: Path):
    (tmp_path / "a b.txt").write_bytes(b"x")
    assert storage_path(f"file://{tmp_path}/a%20b.txt").read() == b"x"


def test_a_small_object_is_one_request(s3):
    """The tag of an upload in parts has their number at its end."""
    storage_path("s3://jobs/small").write(b"one")
    assert "-" not in s3.client.head_object(Bucket="jobs", Key="small")["ETag"]


def test_a_file_that_is_not_there_is_the_same_error_everywhere(root):
    for call in ((root / "nothing").open, (root / "nothing").read):
        with pytest.raises(SourceNotFound, match=r"nothing' cannot be read: there is no such file"):
            call()


def test_places_of_a_bucket_share_one_client(s3):
    one, other = storage_path("s3://jobs/a"), storage_path("s3://jobs/b/c")
    assert isinstance(one, RemotePath)
    assert isinstance(other, RemotePath)
    assert one._fs is other._fs


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"file/below/x' cannot be written: Not a directory\."):
        storage_path(tmp_path / "file" / "below" / "x").write(b"")


@pytest.mark.parametrize("url", ["s3://jobs/torn", "memory://torn"])
def test_an_upload_that_breaks_leaves_no_half_of_a_file(s3, url: str, tmp_path: Path, patched):
    def breaks(source, target, size):
        target.write(source.read(1))
        raise OSError("The disk cannot be read.")

    (tmp_path / "whole").write_bytes(b"whole")
    patched("penstock.sources.failures.pause_s", lambda attempt: 0.0)
    patched(shutil, "copyfileobj", breaks)
    with pytest.raises(Unavailable, match="cannot be written"):
        storage_path(url).upload(tmp_path / "whole")
    assert not storage_path(url).exists()


def test_both_names_of_googles_buckets_are_one(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    assert storage_path("gcs://jobs/a").url == storage_path("gs://jobs/a").url == "gs://jobs/a"
