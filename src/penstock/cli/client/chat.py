"""`penstock chat`: a conversation with a running service, in the terminal."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.bench.load.stream import message
from penstock.cli.client.service import Service
from penstock.cli.models.options import HERE, KEY_HINT, Key, Url
from penstock.cli.process.failure import INTERRUPTED
from penstock.errors import ConfigError, Error, Unavailable


def chat(
    url: Url = HERE,
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="the first")] = None,
    api_key: Key = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(help="A picture or a text that goes with the first question.", show_default=False),
    ] = None,
) -> int:
    """Talk to a running service from the terminal.

    Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists what else there is. Without a terminal,
    each input line is a question.

    - `penstock chat`
    - `penstock chat --file receipt.png`
    - `penstock chat --url http://gpu-box:8000 --model qwen --system "Answer in one sentence."`
    - `echo "What is Penstock?" | penstock chat`
    """
    service = Service(url, api_key, key_hint=KEY_HINT)
    if not model:
        models: list[dict[str, str]] = service.json("GET", "/v1/models", has="data")["data"]
        if not models:
            raise Unavailable("The service serves no model.")
        model = models[0]["id"]
    talk = _Conversation(service, model, system)
    for path in file or ():
        talk.attach(path)
    if interactive := sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # arrow keys and history, where Python was built with them
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
        print(f"{model} at {service.url}. Ctrl-C stops an answer, Ctrl-D ends, /help shows more.")
    failed = False
    for line in _questions(interactive):
        try:
            if not interactive:
                talk.ask(line.strip())
            elif not talk.obeys(line):
                talk.ask((line.removeprefix("/") if line.startswith("//") else line).strip())
        except KeyboardInterrupt:
            print()
            if not interactive:
                return INTERRUPTED
        except Error as error:
            failed = True
            print(f"Error: {_printable(str(error))}", file=sys.stderr)
    return int(failed and not interactive)


class _Conversation:
    """Its messages so far, and the files that go with the next question."""

    def __init__(self, service: Service, model: str, system: str | None) -> None:
        self._service, self._model = service, model
        self._messages: list[dict[str, Any]] = []
        self._files: list[dict[str, Any]] = []
        self._commands = {
            "/model": self.choose,
            "/system": self.begin,
            "/clear": self.begin,
            "/file": self.attach,
            "/save": self.save,
            "/help": self.help,
        }
        self.begin(system or "")

    def obeys(self, line: str) -> bool:
        """Whether the line was a command. One that begins with `//` or a blank is none. Raises: Error."""
        if not line.startswith("/") or line.startswith("//"):
            return False
        word, _, rest = line.partition(" ")
        if (command := self._commands.get(word)) is None:
            raise ConfigError(
                f"There is no {word}; there are {', '.join(self._commands)}. Begin the line with // or a "
                "blank to send it to the model."
            )
        command(rest.strip())
        return True

    def begin(self, system: str) -> None:
        """/clear: forget all that was said. /system TEXT: the same, with another system prompt."""
        self._messages = [{"role": "system", "content": system}] if system else []
        self._files = []

    def choose(self, model: str) -> None:
        """/model [NAME]: talk to another model; without a name, list them."""
        names = [one["id"] for one in self._service.json("GET", "/v1/models", has="data")["data"]]
        if not model:
            print("\n".join(f"{'* ' if name == self._model else '  '}{name}" for name in names))
        elif model in names:
            self._model = model
        else:
            raise ConfigError(f"There is no model {model!r}; there are {', '.join(names)}.")

    def attach(self, path: str) -> None:
        """/file PATH: a picture or a text that goes with the next question."""
        try:
            data = Path(expanduser(path)).read_bytes()
            kind = mimetypes.guess_type(path)[0] or ""
            if kind.startswith("image/"):
                url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
                self._files.append({"type": "image_url", "image_url": {"url": url}})
            else:
                self._files.append({"type": "text", "text": f"{Path(path).name}:\n{data.decode()}"})
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path!r} is neither a picture nor a text.") from error

    def save(self, path: str) -> None:
        """/save FILE: the conversation, as JSON messages."""
        try:
            Path(expanduser(path)).write_text(json.dumps(self._messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be written: {error.strerror}.") from error
        print(f"Saved in {Path(expanduser(path)).absolute()}: {len(self._messages)} messages.")

    def help(self, _: str) -> None:
        """/help: this list."""
        for command in (self.choose, self.attach, self.begin, self.save, self.help):
            print(command.__doc__)
        print("//TEXT, or a blank before it: send a text that begins with a slash.")

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. What came of it is kept, also when it stops early.

        Raises: Error with the service's own message, also in the middle of the stream.
        """
        content = [*self._files, {"type": "text", "text": question}] if self._files else question
        self._messages.append({"role": "user", "content": content})
        body = {"model": self._model, "messages": self._messages, "stream": True}
        answer = ""
        try:
            with contextlib.closing(self._service.send("POST", "/v1/chat/completions", body)) as response:
                if response.status != 200:
                    raise self._service.error(response)
                for piece in _texts(response):
                    answer += piece
                    print(_printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        finally:
            if answer:
                print(flush=True)
                self._messages.append({"role": "assistant", "content": answer})
                self._files = []
            else:
                self._messages.pop()


def _texts(response: Iterable[bytes]) -> Iterator[str]:
    """The texts in the events of a stream up to its `[DONE]`. Raises: Error."""
    line = b""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if event.get("error"):
                raise Error(message(data))
            deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
            if text := "".join(delta.get("content") or "" for delta in deltas):
                yield text
    except (ValueError, AttributeError) as error:
        raise Error(f"The service's answer has an event that is no piece of one: {message(line)}") from error
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
            yield line.rstrip()
