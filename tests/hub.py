"""A local hub: the part of the Hugging Face Hub's API that its own client asks, over folders of this machine.

Repositories may be gated: then their files want a token. Point HF_ENDPOINT to `url`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token-of-the-test"


@dataclass
class Hub:
    """url: what HF_ENDPOINT names. asked: every request so far, as `GET /path`."""

    url: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def files(self, repository: str) -> dict[str, Path]:
        folder = self.repositories[repository]
        return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}

    def commit(self, repository: str) -> str:
        lines = [f"{name} {oid(path)}" for name, path in self.files(repository).items()]
        return hashlib.sha1("\n".join(lines).encode()).hexdigest()


def oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub_server(repositories: dict[str, Path], gated: set[str] | None = None) -> Iterator[Hub]:
    hub = Hub("", dict(repositories), set(gated or ()))

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} /{path}")
        parts = path.split("/")
        if path.startswith("api/models/") and (repository := "/".join(parts[2:4])) in self.hub.repositories:
            self._api(repository, parts[4:])
        elif "/".join(parts[:2]) in self.hub.repositories and parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def _api(self, repository: str, rest: list[str]) -> None:
        files = self.hub.files(repository)
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": p.stat().st_size, "oid": oid(p)}
                for name, p in files.items()
            ]
            return self._json(tree)
        siblings = [
            {"rfilename": name, "size": p.stat().st_size, "blobId": oid(p)} for name, p in files.items()
        ]
        return self._json({"id": repository, "sha": self.hub.commit(repository), "siblings": siblings})

    def _file(self, repository: str, name: str) -> None:
        if repository in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        path = self.hub.files(repository).get(name)
        if path is None:
            return self._refuse(404, "EntryNotFound")
        body = path.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{oid(path)}"', "X-Repo-Commit": self.hub.commit(repository)}
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return self._answer(206 if start else 200, body[start:], headers)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "Refused by the test's hub."})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the requests are in `asked`."""
