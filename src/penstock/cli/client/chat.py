"""`penstock chat`: a conversation with a running service, in the terminal."""

import contextlib
import json
import sys
import unicodedata
from collections.abc import Generator, Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any, TextIO

from penstock.cli.client.service import Service
from penstock.cli.models.options import KEY_HINT
from penstock.errors import Error, Unavailable

Message = dict[str, str]
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class ChatClient:
    """The chat requests of one service."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises: ConfigError when `url` is not the address of a service."""
        self._service = Service(url, api_key, key_hint=KEY_HINT)
        self.url = self._service.url

    def models(self) -> list[str]:
        return [model["id"] for model in self._service.json("GET", "/v1/models")["data"]]

    def stream(self, model: str, messages: list[Message]) -> Generator[str]:
        """The text of the answer, piece by piece. Closing the generator aborts the request.

        Raises: Error with the service's own message, also in the middle of the stream.
        """
        body = {"model": model, "messages": messages, "stream": True}
        with contextlib.closing(self._service.send("POST", "/v1/chat/completions", body)) as response:
            if response.status != 200:
                raise self._service.error(response)
            for event in _events(response):
                if "error" in event:
                    raise Error(event["error"].get("message", "The service gave no reason."))
                if text := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                    yield text


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its `[DONE]`."""
    try:
        for line in response:
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

    def __init__(self, client: ChatClient, model: str, system: str | None = None) -> None:
        self._client, self._model = client, model
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Generator[str]:
        """The answer, piece by piece. What came of it stays in the conversation, also when it stops early."""
        self._messages.append({"role": "user", "content": question})
        answer = ""
        try:
            with contextlib.closing(self._client.stream(self._model, self._messages)) as pieces:
                for piece in pieces:
                    answer += piece
                    yield piece
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()


def chat(client: ChatClient, lines: TextIO, *, model: str | None = None, system: str | None = None) -> int:
    """Exit code of a conversation that lasts until the input ends.

    Raises: Error when the service does not answer or serves nothing.
    """
    models = [model] if model else client.models()
    if not models:
        raise Unavailable("The service serves no model.")
    model = models[0]
    interactive = lines.isatty()
    if interactive:
        _edit_lines()
        print(f"{model} at {client.url}. Ctrl-C stops an answer, Ctrl-D ends.")
    conversation, failed = Conversation(client, model, system), False
    for question in _questions(lines, interactive):
        try:
            with contextlib.closing(conversation.ask(question)) as answer:
                _show(answer)
        except KeyboardInterrupt:
            print()
            if not interactive:
                return _INTERRUPTED
        except Error as error:
            failed = True
            print(f"Error: {_printable(str(error))}", file=sys.stderr)
    return int(failed and not interactive)


def _show(answer: Iterator[str]) -> None:
    begun = False
    try:
        for piece in answer:
            begun = True
            print(_printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    finally:
        if begun:
            print(flush=True)


def _printable(text: str) -> str:
    """Text without control characters, which could change the terminal or its clipboard."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")


def _questions(lines: TextIO, interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if interactive else next(lines)
        except KeyboardInterrupt:
            print()
            continue
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _edit_lines() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
