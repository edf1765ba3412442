"""A model on a plain web server, by fsspec."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock import sources
from penstock.errors import DownloadFailed, SourceNotFound

pytestmark = pytest.mark.parity("S10")

SECRET = "sesame"


class Quiet(SimpleHTTPRequestHandler):
    """Files below `signed` want a signature."""

    def do_GET(self) -> None:
        if self.path.startswith("/signed/") and not self.path.endswith(f"?sig={SECRET}"):
            return self.send_error(403)
        return super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the folder `web`, with `model/config.json` and `model/sub/weights`."""
    (tmp_path / "web" / "model" / "sub").mkdir(parents=True)
    (tmp_path / "web" / "model" / "config.json").write_text("{}")
    (tmp_path / "web" / "signed").mkdir()
    (tmp_path / "web" / "signed" / "template").write_text("t")
    (tmp_path / "web" / "model" / "sub" / "weights").write_bytes(bytes(100_000))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_files_that_a_web_server_lists_are_fetched(url: str):
    folder = sources.fetch(f"{url}/model")
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "sub" / "weights").stat().st_size == 100_000
    assert sources.children(f"{url}/model/", "weights") == ["sub"]


def test_a_file_that_was_changed_without_an_etag_is_fetched_again(url: str, tmp_path: Path):
    """`Last-Modified` counts whole seconds."""
    config = tmp_path / "web" / "model" / "config.json"
    os.utime(config, (1, 1))
    sources.fetch(f"{url}/model")
    config.write_text("[]")
    assert (sources.fetch(f"{url}/model") / "config.json").read_text() == "[]"


def test_a_server_that_tells_no_versions_is_named_once(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(Quiet, "date_time_string", lambda self, timestamp=None: "")
    for _ in range(2):
        sources.fetch(f"{url}/model")
    assert caplog.text.count("tells no versions") == 1


def test_a_signed_file_has_its_plain_name(url: str):
    signed = f"{url}/signed/template?sig={SECRET}"
    assert [path.name for path in sources.fetch(signed).iterdir()] == ["template"]
    folder = sources.fetch(f"{url}/model", [(signed, "chat_template.jinja")])
    assert (folder / "chat_template.jinja").read_text() == "t"


@pytest.mark.parity("S6")
@pytest.mark.parametrize("path", ["/signed/template?wrong-sig", "/nowhere?sig"])
def test_neither_an_error_nor_its_cause_tells_a_signature_or_a_login(url: str, path: str):
    with pytest.raises((DownloadFailed, SourceNotFound)) as caught:
        sources.fetch(url.replace("://", f"://me:{SECRET}@") + f"{path}={SECRET}", tries=1)
    logged = "".join(traceback.format_exception(caught.value))
    assert f"'{url}{path.partition('?')[0]}'" in logged
    assert SECRET not in logged


def test_a_page_that_is_not_there_is_named(url: str):
    with pytest.raises(SourceNotFound, match="/nowhere' was not found"):
        sources.fetch(f"{url}/nowhere")


def test_a_web_server_that_is_down_is_told_without_the_login_of_its_url():
    with pytest.raises(DownloadFailed) as caught:
        sources.fetch("http://me:secret@127.0.0.1:9/model", tries=1)  # the port of "discard"
    assert str(caught.value) == "'http://127.0.0.1:9/model' cannot be read: the server cannot be reached."


@pytest.mark.parametrize("name", ["../../../../outside", "..%2f..%2foutside", "sub/../../outside"])
def test_no_server_writes_outside_of_the_cache(url: str, tmp_path: Path, name: str):
    evil = tmp_path / "web" / "evil"
    evil.mkdir()
    (evil / "index.html").write_text(f'<a href="config.json">a</a> <a href="{name}">b</a>')
    (evil / "config.json").write_text("{}")
    for place in (tmp_path / "web", tmp_path):
        (place / "outside").write_text("theirs")
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    try:
        folder = sources.fetch(f"{url}/evil")
    except (SourceNotFound, DownloadFailed):
        pass
    else:
        assert all(path.resolve().is_relative_to(folder) for path in folder.rglob("*"))
    cached = [path for path in (tmp_path / "cache").rglob("outside*") if path.is_file()]
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert cached == []


@pytest.mark.parametrize("to", ["../outside", "a/../../outside"])
def test_extra_files_stay_in_the_models_folder(url: str, to: str):
    with pytest.raises(SourceNotFound, match="not below its own folder"):
        sources.fetch(f"{url}/model", [(f"{url}/model/config.json", to)])
