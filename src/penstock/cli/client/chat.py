"""`penstock chat`: a conversation with a running service, in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import unicodedata
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Annotated

import typer

from penstock.cli.client.service import Service
from penstock.cli.models.options import HERE, KEY_HINT, Key, Url
from penstock.errors import Error, Unavailable

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def chat(
    url: Url = HERE,
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="the first")] = None,
    api_key: Key = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> int:
    """Talk to a running service from the terminal.

    Ctrl-C stops an answer, Ctrl-D ends the conversation. Without a terminal, each input line is a question.

    - `penstock chat`
    - `penstock chat --url http://gpu-box:8000 --model qwen --system "Answer in one sentence."`
    - `echo "What is Penstock?" | penstock chat`
    """
    service = Service(url, api_key, key_hint=KEY_HINT)
    if not model:
        models: list[dict[str, str]] = service.json("GET", "/v1/models")["data"]
        if not models:
            raise Unavailable("The service serves no model.")
        model = models[0]["id"]
    if interactive := sys.stdin.isatty():
        _edit_lines()
        print(f"{model} at {service.url}. Ctrl-C stops an answer, Ctrl-D ends.")
    failed, messages = False, [{"role": "system", "content": system}] if system else []
    for question in _questions(interactive):
        messages.append({"role": "user", "content": question})
        try:
            _answer(service, model, messages)
        except KeyboardInterrupt:
            print()
            if not interactive:
                return _INTERRUPTED
        except Error as error:
            failed = True
            print(f"Error: {_printable(str(error))}", file=sys.stderr)
    return int(failed and not interactive)


def _answer(service: Service, model: str, messages: list[dict[str, str]]) -> None:
    """Prints the answer as it comes. What came of it stays in `messages`, also when it stops early.

    Raises: Error with the service's own message, also in the middle of the stream.
    """
    body = {"model": model, "messages": messages, "stream": True}
    answer = ""
    try:
        with contextlib.closing(service.send("POST", "/v1/chat/completions", body)) as response:
            if response.status != 200:
                raise service.error(response)
            for piece in _texts(response):
                answer += piece
                print(_printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    finally:
        if answer:
            print(flush=True)
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()


def _texts(response: HTTPResponse) -> Iterator[str]:
    """The texts in the events of a stream up to its `[DONE]`. Raises: Error."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise Error(event["error"].get("message", "The service gave no reason."))
            if text := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                yield text
    except (OSError, HTTPException) as error:
        raise Unavailable(f"The connection broke in the middle of the answer ({error}).") from error
    raise Unavailable("The service closed the connection in the middle of the answer.")


def _printable(text: str) -> str:
    """Text without control characters, which could change the terminal or its clipboard."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) != "Cc")


def _questions(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if interactive else next(sys.stdin)
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
