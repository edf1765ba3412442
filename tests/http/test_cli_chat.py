"""`penstock chat` against a real gateway."""

import asyncio
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from served import Served, until

from penstock.asgi import Receive, Scope, Send
from penstock.cli.client.chat import chat
from penstock.errors import ConfigError, Unauthorized, Unavailable

Captured = pytest.CaptureFixture[str]


async def talk(url: str, said: str, **options: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(said))
        return await asyncio.to_thread(partial(chat, url, **options))


async def test_each_line_is_answered(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m")
    await served.replica(replies={"one": "first", "two": "second"})
    assert await talk(served.url, "one\n\ntwo\n") == 0
    assert capsys.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_terminal_gets_no_control_characters(served: Served, capsys, monkeypatch, terminal: bool):
    says = "a\tb\x1b]0;title\x07\x9b31m\r\n"
    await served.gateway("m")
    await served.replica(reply=says)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert await talk(served.url, "who?") == 0
    assert capsys.readouterr().out == ("a\tb]0;title31m\n\n" if terminal else f"{says}\n")


async def test_model_can_be_chosen(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m", "n")
    await served.replica("m", reply="from m")
    await served.replica("n", reply="from n")
    assert await talk(served.url, "who?", model="n") == 0
    assert capsys.readouterr().out == "from n\n"


async def test_conversation_holds_every_turn(served: Served, capsys: pytest.CaptureFixture[str]):
    """Answers with the roles of all messages."""

    async def roles(scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        text = " ".join(message["role"] for message in body["messages"])
        event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})

    await served.gateway("m")
    await served.app(roles)
    assert await talk(served.url, "and?\nand?\n", model="m", system="Be brief.") == 0
    assert capsys.readouterr().out == "system user\nsystem user assistant user\n"


async def test_unknown_model_is_told_and_fails(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m")
    await served.replica()
    assert await talk(served.url, "hello", model="other") == 1
    assert capsys.readouterr().err.startswith("Error: ")


async def test_answer_that_breaks_off_is_told_after_its_beginning(
    served: Served, capsys: pytest.CaptureFixture[str]
):
    await served.gateway("m")
    await served.replica(reply="a long answer that breaks off", fail_after_tokens=3)
    assert await talk(served.url, "hello") == 1
    told = capsys.readouterr()
    assert told.out.startswith("a long")
    assert told.err.startswith("Error: ")


class Interrupted(io.StringIO):
    """The user presses Ctrl-C at the first piece of the answer."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


async def test_interrupted_answer_stops_the_engine(served: Served, monkeypatch: pytest.MonkeyPatch):
    await served.gateway("m")
    replica = await served.replica(reply="word " * 1000, step_base_ms=20)
    monkeypatch.setattr("sys.stdout", Interrupted())
    assert await talk(served.url, "go on") == 130
    await until(lambda: replica.engine.load().running == 0)


async def test_missing_key_is_told_with_what_to_do(served: Served):
    await served.gateway("m", api_key="secret")
    with pytest.raises(Unauthorized, match="PENSTOCK_API_KEY"):
        await talk(served.url, "hello")


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/"])
async def test_url_is_taken_with_and_without_v1(served: Served, form: str):
    await served.gateway("m")
    await served.replica()
    assert await talk(form.format(served.url.removeprefix("http://")), "hello") == 0


async def test_silent_address_is_told_with_what_to_do(free_port: int):
    with pytest.raises(Unavailable, match=f"Nothing answers at http://127.0.0.1:{free_port}"):
        chat(f"127.0.0.1:{free_port}")


async def test_error_status_without_an_envelope_is_told(served: Served, capsys: pytest.CaptureFixture[str]):
    async def teapot(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"short and stout"})

    await served.gateway("m")
    await served.app(teapot)
    assert await talk(served.url, "hello", model="m") == 1
    assert "418: short and stout" in capsys.readouterr().err


async def answering(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it was sent."""
    body = json.loads((await receive())["body"])
    text = json.dumps([body["model"], *(message["content"] for message in body["messages"])])
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})


async def on_a_terminal(url: str, *lines: str, **options: Any) -> int:
    """As talk, with a user at a prompt."""
    said = iter(lines)

    def line(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", line)
        patch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        return await asyncio.to_thread(partial(chat, url, **options))


async def test_files_go_with_the_next_question(served: Served, capsys: Captured, tmp_path: Path):
    await served.gateway("m")
    await served.app(answering)
    (tmp_path / "notes.txt").write_text("milk")
    (tmp_path / "dot.png").write_bytes(b"\x89PNG")
    (tmp_path / "blob").write_bytes(b"\xff\xfe")
    notes = str(tmp_path / "notes.txt")
    assert await talk(served.url, "what?\nand?\n", model="m", file=[notes, str(tmp_path / "dot.png")]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    text, picture, question = first[1]
    assert text == {"type": "text", "text": "notes.txt:\nmilk"}
    assert picture["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert question == {"type": "text", "text": "what?"}
    assert second[-1] == "and?"
    for path, why in ((str(tmp_path / "no"), "No such file"), (str(tmp_path / "blob"), "neither a picture")):
        with pytest.raises(ConfigError, match=why):
            await talk(served.url, "what?", model="m", file=[path])


async def test_commands_of_a_terminal(served: Served, capsys: Captured, tmp_path: Path):
    await served.gateway("m", "n")
    await served.app(answering)
    await served.app(answering, "n")
    saved = tmp_path / "talk.json"
    lines = (
        "hi",
        "/model n",
        "/system Be brief.",
        "yo",
        f"/save {saved}",
        "/clear",
        "/file nothing",
        "/svae talk.json",
        "//etc is?",
        " /usr is?",
    )
    assert await on_a_terminal(served.url, *lines, model="m") == 0
    told = capsys.readouterr()
    answers = [json.loads(line) for line in told.out.splitlines() if line.startswith("[")]
    assert answers[:3] == [["m", "hi"], ["n", "Be brief.", "yo"], ["n", "/etc is?"]]
    assert answers[3][-1] == "/usr is?"
    assert [one["role"] for one in json.loads(saved.read_text())] == ["system", "user", "assistant"]
    assert "'nothing' cannot be read: No such file" in told.err
    assert f"Saved in {saved}: 3 messages." in told.out
    assert "There is no /svae; there are /model, /system, /clear, /file, /save, /help." in told.err
    assert await on_a_terminal(served.url, "/model", "/model x", "/help", model="m") == 0
    told = capsys.readouterr()
    assert "* m\n  n\n" in told.out
    assert "There is no model 'x'; there are m, n." in told.err
    assert "/save FILE: the conversation, as JSON messages." in told.out


async def test_a_pipe_has_no_commands(served: Served, capsys: Captured):
    await served.gateway("m")
    await served.app(answering)
    assert await talk(served.url, "/clear\n", model="m") == 0
    assert json.loads(capsys.readouterr().out) == ["m", "/clear"]
