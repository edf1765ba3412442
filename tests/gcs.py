"""A local Google Cloud Storage: the part of its JSON API that Arrow's client asks, over a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@contextmanager
def gcs_server(root: Path) -> Iterator[str]:
    """Each folder of `root` is a bucket. Gives what STORAGE_EMULATOR_HOST names.

    In a process of its own: Arrow's client waits for its first bytes with Python's lock in hand.
    """
    with subprocess.Popen([sys.executable, __file__, str(root)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        bucket, found, name = url.path.partition("/b/")[2].partition("/o")
        below, name = self.folder / bucket, unquote(name.strip("/"))
        if not below.is_dir():
            self._json(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
        elif not found:
            self._json(200, {"kind": "storage#bucket", "name": bucket})
        elif not name:
            self._json(200, _listing(below, bucket, asked.get("prefix", ""), asked.get("delimiter")))
        elif not (below / name).is_file():
            self._json(404, {"error": {"code": 404, "message": f"No such object: {bucket}/{name}"}})
        elif asked.get("alt") == "media":
            self._media((below / name).read_bytes())
        else:
            self._json(200, _object(below, bucket, name))

    def _json(self, status: int, value: Any) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _media(self, body: bytes) -> None:
        start, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        last = min(int(end), len(body) - 1) if end else len(body) - 1
        headers = {"Content-Range": f"bytes {start}-{last}/{len(body)}", "x-goog-generation": "1"}
        self._answer(206 if "Range" in self.headers else 200, body[int(start) : last + 1], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _listing(folder: Path, bucket: str, prefix: str, delimiter: str | None) -> dict[str, Any]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name.startswith(prefix)]
    deeper = [name for name in names if delimiter and delimiter in name[len(prefix) :]]
    prefixes = {prefix + name[len(prefix) :].partition(delimiter or "/")[0] + "/" for name in deeper}
    items = [_object(folder, bucket, name) for name in names if name not in deeper]
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


def _object(folder: Path, bucket: str, name: str) -> dict[str, Any]:
    size = (folder / name).stat().st_size
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(size),
        "generation": "1",
        "metageneration": "1",
        "timeCreated": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
        "timeStorageClassUpdated": "2026-01-01T00:00:00Z",
    }


if __name__ == "__main__":
    _Handler.folder = Path(sys.argv[1])
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(listening.server_port, flush=True)
    listening.serve_forever()
