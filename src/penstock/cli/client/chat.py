"""`penstock chat`: a conversation in the terminal with a service that runs. Speaks HTTP only.

Standard library on purpose: a conversation waits for one answer at a time, and the command is there at once.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TextIO

from penstock.cli.client.address import parsed
from penstock.errors import Error, Unauthorized, Unavailable

Message = dict[str, str]
_CONNECT_S = 5.0
_STOPPED = 130  # what a shell gives for SIGINT


class Service:
    """An OpenAI-compatible service at `url`, with or without the `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises: ConfigError where the URL is none."""
        parts = parsed(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._prefix = parts.path + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        with contextlib.closing(self._request("GET", "/models")) as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def stream(self, model: str, messages: list[Message]) -> Generator[str]:
        """The answer's text, piece by piece. Closing it stops the generation.

        Raises: Error with the service's own message, also in the middle of the stream.
        """
        body = {"model": model, "messages": messages, "stream": True}
        with contextlib.closing(self._request("POST", "/chat/completions", body)) as answer:
            for event in _events(answer):
                if "error" in event:
                    raise Error(event["error"].get("message", "The service gave no reason."))
                if text := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                    yield text

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        connect = HTTPSConnection if self._secure else HTTPConnection
        connection = connect(self._netloc, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # the first token may take its time
            connection.request(method, self._prefix + path, json.dumps(body) if body else None, self._headers)
            answer = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise Unavailable(
                f"Nothing answers at {self.url} ({error}). Start a service with `penstock serve`, "
                "or name another with --url."
            ) from error
        if answer.status != 200:
            with contextlib.closing(answer):
                raise _error(answer.status, answer.read())
        return answer


def _events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its `[DONE]`."""
    try:
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"The connection broke in the middle of the answer ({error}).") from error
    raise Unavailable("The service closed the connection in the middle of the answer.")


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, service: Service, model: str, system: str | None = None) -> None:
        self._service, self._model = service, model
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Generator[str]:
        """The answer, piece by piece. What was given of it counts as said, also when it stops early."""
        self._messages.append({"role": "user", "content": question})
        answer = ""
        try:
            with contextlib.closing(self._service.stream(self._model, self._messages)) as pieces:
                for piece in pieces:
                    answer += piece
                    yield piece
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()


def chat(service: Service, inlet: TextIO, *, model: str | None = None, system: str | None = None) -> int:
    """Exit code of a conversation that lasts until the input ends.

    Raises: Error when the service does not answer or serves nothing.
    """
    model = model or _first(service.models())
    interactive = inlet.isatty()
    if interactive:
        _edit_lines()
        print(f"{model} at {service.url}. Ctrl-C stops an answer, Ctrl-D ends.")
    conversation, failed = Conversation(service, model, system), False
    for question in _questions(inlet, interactive):
        try:
            with contextlib.closing(conversation.ask(question)) as answer:
                _show(answer)
        except KeyboardInterrupt:
            print()
            if not interactive:
                return _STOPPED
        except Error as error:
            failed = True
            print(f"Error: {error}", file=sys.stderr)
    return int(failed and not interactive)


def _show(answer: Iterator[str]) -> None:
    begun = False
    try:
        for piece in answer:
            begun = True
            print(piece, end="", flush=True)
    finally:
        if begun:
            print(flush=True)


def _questions(inlet: TextIO, interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if interactive else next(inlet)
        except KeyboardInterrupt:
            print()
            continue
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _first(models: list[str]) -> str:
    if not models:
        raise Unavailable("The service serves no model.")
    return models[0]


def _edit_lines() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]


def _error(status: int, body: bytes) -> Error:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"The service answered with status {status}: {body[:200].decode(errors='replace')}"
    if status == 401:
        return Unauthorized(f"{message} Give the key with --api-key or in PENSTOCK_API_KEY.")
    return Error(message)
