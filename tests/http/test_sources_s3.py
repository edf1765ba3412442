"""Models in a bucket, from a local S3 server, some of them through a connection that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from bucket import S3, SECRET, s3_server

from penstock import sources
from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources import bucket

pytestmark = pytest.mark.parity("S10")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """With `s3://models/m`: a config of 2 bytes and weights of 9 MB in two parts of ours."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (9_000_000 // 256))
    with s3_server("models") as server:
        server.upload(folder, "models", "m")
        yield server


@pytest.fixture(autouse=True)
def cache(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass
class Front:
    """A server before S3. misfortunes: what happens to the next reads of objects, one each."""

    misfortunes: list[str] = field(default_factory=list)
    reads: int = 0


@contextmanager
def front_of(s3: S3, monkeypatch: pytest.MonkeyPatch, *misfortunes: str) -> Iterator[Front]:
    front = Front(list(misfortunes))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with lock:
                is_read = self.command == "GET" and "list-type" not in self.path
                front.reads += is_read
                misfortune = front.misfortunes.pop(0) if is_read and front.misfortunes else ""
            if misfortune.isdigit():
                return self.answer(int(misfortune), b"", {})
            status, body, headers = self.forwarded()
            return self.answer(status, body, headers, cut=misfortune == "cut")

        do_HEAD = do_GET

        def forwarded(self) -> tuple[int, bytes, dict[str, str]]:
            passed = {name: text for name, text in self.headers.items() if name.lower() != "connection"}
            asked = Request(s3.url + self.path, method=self.command, headers=passed)
            try:
                with urlopen(asked) as answer:
                    return answer.status, answer.read(), dict(answer.headers)
            except HTTPError as error:
                return error.code, error.read(), dict(error.headers)

        def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        yield front
    finally:
        server.shutdown()
        server.server_close()


def test_a_folder_of_a_bucket_comes_whole():
    folder = sources.fetch("s3://models/m")
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * (9_000_000 // 256)
    assert sources.children("s3://models", "config.json") == ["m"]


def test_large_files_come_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket, "_PART_BYTES", 4 << 20)
    folder = sources.fetch("s3://models/m")
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * (9_000_000 // 256)


def test_an_object_is_a_source_too():
    assert (sources.fetch("s3://models/m/config.json") / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("s3://nowhere/m", "'s3://nowhere/m' was not found: there is no such bucket."),
        ("s3://models/other", "'s3://models/other' was not found: it holds no files."),
    ],
)
def test_what_is_not_there_is_named(source: str, said: str):
    with pytest.raises(SourceNotFound) as caught:
        sources.fetch(source)
    assert str(caught.value) == said


def test_a_lost_connection_is_tried_again(s3: S3, monkeypatch: pytest.MonkeyPatch):
    with front_of(s3, monkeypatch, "cut", "503", "cut"):
        folder = sources.fetch("s3://models/m")
    assert (folder / "model.safetensors").stat().st_size == 8_999_936


def test_what_fails_each_time_is_told_with_its_file_and_its_tries(s3: S3, monkeypatch: pytest.MonkeyPatch):
    with front_of(s3, monkeypatch, *["500"] * 40), pytest.raises(DownloadFailed) as caught:
        sources.fetch("s3://models/m", tries=2, only=["*.safetensors"])
    said = "The download of 's3://models/m/model.safetensors' failed after 2 tries: the server failed."
    assert str(caught.value) == said


def test_refused_credentials_are_told_at_once(s3: S3, monkeypatch: pytest.MonkeyPatch):
    with front_of(s3, monkeypatch, "403", "403") as front, pytest.raises(DownloadFailed) as caught:
        sources.fetch("s3://models/m", only=["*.safetensors"])
    assert "failed: access is denied: the credentials are missing or wrong" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert front.reads == 1


def test_a_server_that_is_down_is_told_and_what_is_here_is_used(monkeypatch: pytest.MonkeyPatch):
    folder = sources.fetch("s3://models/m")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the port of "discard": nobody listens
    assert sources.fetch("s3://models/m", tries=1) == folder
    with pytest.raises(
        DownloadFailed, match="'s3://models/else' cannot be read: the server cannot be reached"
    ):
        sources.fetch("s3://models/else", tries=1)


def test_many_processes_download_once(s3: S3, monkeypatch: pytest.MonkeyPatch):
    code = "from penstock import sources; print(sources.fetch('s3://models/m', only=['*.safetensors']))"
    with front_of(s3, monkeypatch) as front:
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        folders = {process.communicate()[0].strip() for process in processes}
    assert len(folders) == 1
    assert (Path(folders.pop()) / "model.safetensors").stat().st_size == 8_999_936
    assert front.reads == 1


def test_an_unfinished_download_goes_on_where_it_was(s3: S3, monkeypatch: pytest.MonkeyPatch):
    s3.client.put_object(Bucket="models", Key="two/a", Body=b"a")
    s3.client.put_object(Bucket="models", Key="two/b", Body=b"b" * 1000)

    def fail_at_the_second(done: int, total: int) -> None:
        if done == total:
            raise InterruptedError

    with front_of(s3, monkeypatch) as front:
        with pytest.raises(DownloadFailed):
            sources.fetch("s3://models/two", watch=fail_at_the_second, tries=1)
        reads = front.reads
        sources.fetch("s3://models/two")
        assert front.reads == reads + 1
