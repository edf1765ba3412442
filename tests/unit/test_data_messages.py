"""Messages of rows: roles, contents, and everything to be seen or heard as a data URL."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bucket import s3_server
from openai.types.chat import ChatCompletionMessage
from pictures import data_url, encoded
from PIL import Image

from penstock.data.rows.builder import build_request
from penstock.data.rows.request import Task
from penstock.errors import BadRequest, DownloadFailed

RED = Image.new("RGB", (4, 3), "red")
PNG = encoded(RED)
CUT = Image.open(io.BytesIO(encoded(Image.effect_noise((64, 64), 50))[:2000]))
MP4 = b"\0\0\0\x18ftypmp42" + bytes(20)
REMOTE = "https://pictures.example.com/one.png"


def sent(messages: Any, task: Task | None = None) -> list[dict[str, Any]]:
    return json.loads(build_request({"messages": messages}, task or Task()).body)["messages"]


def part(**fields: Any) -> dict[str, Any]:
    """The one part of a message, as it is sent."""
    (message,) = sent([{"role": "user", "content": [fields]}])
    return message["content"][0]


def refusal(messages: Any, task: Task | None = None) -> str:
    with pytest.raises(BadRequest) as caught:
        sent(messages, task)
    return str(caught.value)


def refused_part(**fields: Any) -> str:
    return refusal([{"role": "user", "content": [fields]}])


def picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head.startswith("data:image/")
    return Image.open(io.BytesIO(base64.b64decode(data)))


# -- messages


def test_messages_arrive_as_they_are():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Bé brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "extra": {"a": None}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "tool_calls": [call]},
    ]
    assert sent(messages) == messages
    assert sent(tuple(messages)) == sent(np.array(messages, object)) == messages


@pytest.mark.parity("D7")
def test_what_a_table_filled_with_none_is_left_out():
    part = {"type": "text", "text": "a"}
    shown = {"type": "image_url", "image_url": {"url": REMOTE, "detail": "low"}}
    plain = [{"role": "user", "content": [part]}]
    other = [{"role": "assistant", "content": None, "name": "c"}, {"role": "user", "content": [shown]}]
    rows = [row["messages"] for row in pa.table({"messages": [plain, other]}).to_pylist()]
    assert rows[0][0]["name"] is None
    assert [sent(row) for row in rows] == [plain, other]


def test_an_answer_of_the_openai_client_is_a_turn():
    turn = ChatCompletionMessage(role="assistant", content="Hi")
    assert sent([{"role": "user", "content": b"Hi"}, turn]) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi"},
    ]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Hi", "messages is 'Hi', a str; it must be a list of messages"),
        ([], "messages is empty"),
        (["Hi"], "messages[0] is 'Hi', a str; it must be a dict with 'role' and 'content'."),
        ([{"content": "x"}], "messages[0].role is missing; it must be a string"),
        ([{"role": 1, "content": "x"}], "messages[0].role is 1, an int"),
        (
            [{"role": "usr", "content": "x"}],
            "messages[0].role is 'usr', which is not known; did you mean 'user'?",
        ),
        ([{"role": "user"}], "messages[0].content is missing"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content is 5, an int; it must be a string or a list of parts.",
        ),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content is a dict"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0] is 5, an int; a part must be a dict"),
        (
            [{"role": "user", "content": [{"text": "x"}]}],
            "content[0] is a part without 'type'; there are text, image",
        ),
    ],
)
@pytest.mark.parity("D15")
def test_a_bad_message_is_told_its_place(messages: Any, said: str):
    assert said in refusal(messages)


# -- pictures


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(PNG, id="bytes"),
        pytest.param(RED, id="picture"),
        pytest.param(np.asarray(RED), id="array"),
        pytest.param({"bytes": PNG, "path": None}, id="dataset"),
        pytest.param(pa.scalar(PNG), id="scalar"),
        pytest.param(data_url(RED), id="data"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "image_url", "image_pil"])
@pytest.mark.parity("D9")
def test_a_picture_in_any_form_is_a_data_url_of_the_same_pixels(value: Any, kind: str):
    found = part(type=kind, **{kind: value})
    assert found["type"] == "image_url"
    assert np.array_equal(np.asarray(picture(found["image_url"]["url"])), np.asarray(RED))


@pytest.mark.parity("D9")
def test_openais_form_keeps_its_details_and_urls_of_the_web_stay():
    held = {"url": REMOTE, "detail": "low"}
    assert part(type="image_url", image_url=held) == {"type": "image_url", "image_url": held}
    found = part(type="image", image=REMOTE, max_pixels=5, text=None)
    assert found == {"type": "image_url", "image_url": {"url": REMOTE}, "max_pixels": 5}
    assert part(type="image", url=REMOTE)["image_url"] == {"url": REMOTE}


@pytest.mark.parity("D9")
def test_files_are_read_by_path_and_by_url(tmp_path: Path):
    file = tmp_path / "a picture.png"
    file.write_bytes(PNG)
    for value in (file, str(file), file.as_uri(), {"path": str(file)}):
        assert part(type="image", image=value)["image_url"]["url"] == data_url(RED)
    assert part(type="image", path=str(file))["image_url"]["url"] == data_url(RED)


@pytest.mark.parity("D9")
def test_pictures_come_from_a_bucket(monkeypatch: pytest.MonkeyPatch):
    with s3_server("pictures") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        s3.client.put_object(Bucket="pictures", Key="red one.png", Body=PNG)
        found = part(type="image_url", image_url={"url": "s3://pictures/red one.png"})
        assert found["image_url"]["url"] == data_url(RED)
        assert "there is no such file" in refused_part(type="image", image="s3://pictures/none.png")
        assert "no such file" in refused_part(type="image", image="s3://nobucket/none.png")


@pytest.mark.parity("D9")
def test_a_bucket_that_is_not_reached_may_be_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(DownloadFailed, match=r"'s3://pictures/red\.png' cannot be read"):
        part(type="image", image="s3://pictures/red.png")


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "F", "P", "1", "I;16"])
def test_pictures_of_every_mode_can_be_sent(mode: str):
    assert picture(part(type="image", image=Image.new(mode, (4, 3)))["image_url"]["url"]).size == (4, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            b"no picture",
            "has bytes that begin with b'no pictu', which is not a known image format; use PNG",
        ),
        (b"", "has no bytes at all, which is not a known image format"),
        (MP4, "has video/mp4, which is not a known image format"),
        ("", "is an empty string; give bytes, a PIL image, a path, or a URL"),
        ("/no/such.png", "is '/no/such.png': there is no such file; give bytes"),
        ("nosuch://a/b.png", "'nosuch://a/b.png' cannot be reached: Protocol not known: nosuch"),
        ("zip://a::file:///b.png", "is 'zip://a::file:///b.png': there is no such file"),
        ("~nobody-of-this-name/a.png", "is '~nobody-of-this-name/a.png': there is no such file"),
        ("/", "is '/': there is no such file"),
        ("iVBORw0KGgo" * 1000, "...: there is no such file; give bytes"),
        (CUT, "is an image that cannot be read (image file is truncated"),
        (5, "is an int; give bytes, a PIL image"),
        (None, "is a part of type 'image' without 'image'"),
        ({"a": 1}, "is a dict with the keys 'a'; give bytes"),
        (np.zeros((2, 2, 3)), "is an array of float64; an image must be of uint8"),
        (np.zeros((2, 2, 2, 2), np.uint8), "is an array of shape (2, 2, 2, 2)"),
    ],
)
@pytest.mark.parity("D15")
def test_what_is_no_picture_is_refused_by_its_place(value: Any, said: str):
    sentence = refused_part(type="image", image=value)
    assert sentence.startswith("messages[0].content[0]")
    assert said in sentence


@pytest.mark.parametrize("value", ["file:///etc/hostname", "/etc/hostname", "s3://bucket/key"])
def test_rows_of_strangers_read_no_files(value: str):
    messages = [{"role": "user", "content": [{"type": "image", "image": value}]}]
    assert "files are not read here" in refusal(messages, Task(read_files=False))


# -- videos and sounds


@pytest.mark.parity("D9")
def test_a_video_is_a_file_or_pictures_one_after_another():
    found = part(type="video", video=MP4)
    assert found == {"type": "video_url", "video_url": {"url": data_url(MP4, "video/mp4")}}
    frames = part(type="video", video=[RED, RED])["video_url"]["url"]
    head, *shots = frames.split(",")
    assert head == "data:video/jpeg;base64"
    assert [Image.open(io.BytesIO(base64.b64decode(shot))).size for shot in shots] == [(4, 3)] * 2
    assert "[1] is an int; a video's frames must be images" in refused_part(type="video", video=[RED, 5])


def sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(np.array([0, 32767, -32767], "<i2").tobytes())
    return file.getvalue()


@pytest.mark.parity("D9")
def test_a_sound_is_a_file_or_samples():
    samples = {"array": np.array([0.0, 1.0, -1.0]), "sampling_rate": 16000, "path": None}
    for value in (sound(), samples):
        assert part(type="audio", audio=value) == {
            "type": "audio_url",
            "audio_url": {"url": data_url(sound(), "audio/wav")},
        }
        expected = {"data": base64.b64encode(sound()).decode(), "format": "wav"}
        assert part(type="input_audio", input_audio=value)["input_audio"] == expected
    stereo = {"array": np.zeros((2, 5), np.float32), "sampling_rate": 8000}
    assert part(type="audio", audio=stereo)["audio_url"]["url"].startswith("data:audio/wav")


@pytest.mark.parity("D9")
def test_openais_sound_stays():
    held = {"data": "UklGRg==", "format": "wav"}
    assert part(type="input_audio", input_audio=held) == {"type": "input_audio", "input_audio": held}
    given = {"data": sound(), "format": "wav"}
    assert part(type="input_audio", input_audio=given)["input_audio"]["format"] == "wav"


def test_samples_without_a_rate_are_refused():
    assert "without 'sampling_rate'" in refused_part(type="audio", audio={"array": [0.0]})
    assert "use a part of type audio_url" in refused_part(type="input_audio", input_audio={"path": REMOTE})
