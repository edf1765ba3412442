"""How `penstock bench` reads an answer: what counts as text, and which name a bad answer gets."""

import pytest

from penstock.bench.load.stream import Stream

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{"content":""},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = ROLE + TOKEN + TOKEN + LAST + USAGE + DONE


def read(*pieces: bytes, status: int = 200, kind: bytes = b"text/event-stream; charset=utf-8") -> Stream:
    """An answer whose i-th piece comes at second i."""
    stream = Stream(keep_text=True)
    stream.head(status, kind)
    for at, piece in enumerate(pieces):
        stream.piece(piece, float(at))
    stream.end(float(len(pieces)))
    return stream


def test_events_with_text_are_timed_and_no_others() -> None:
    stream = read(ROLE, TOKEN, TOKEN, LAST, USAGE, DONE)
    assert not stream.error()
    assert list(stream.times) == [1.0, 2.0]
    assert stream.text == "xx"
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (7, 2)


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_events_in_pieces_are_the_same_events(size: int) -> None:
    stream = read(*(GOOD[at : at + size] for at in range(0, len(GOOD), size)))
    assert not stream.error()
    assert len(stream.times) == 2


@pytest.mark.parametrize(
    "answer",
    [
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace(b"data: ", b"data:"),
        b": ping\n\n" + GOOD.replace(b"data: ", b"event: x\ndata: "),
        GOOD.rstrip(b"\n"),
    ],
)
def test_other_forms_of_events_are_read(answer: bytes) -> None:
    stream = read(answer)
    assert not stream.error()
    assert len(stream.times) == 2


@pytest.mark.parametrize(
    "delta",
    [b'{"reasoning_content":"hm"}', b'{"reasoning":"hm"}', b'{"tool_calls":[{"index":0}]}'],
)
def test_thoughts_and_calls_of_tools_are_tokens(delta: bytes) -> None:
    assert len(read(b'data: {"choices":[{"delta":%b}]}\n\n' % delta).times) == 1


def test_completions_have_their_text_elsewhere() -> None:
    stream = read(b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n', DONE)
    assert (stream.error(), stream.text) == ("", "a")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ROLE + TOKEN + LAST, "no [DONE]"),
        (ROLE + TOKEN + DONE, "no finish reason"),
        (ROLE + LAST + DONE, "no text"),
        (ROLE + TOKEN + b'data: {"error":{"message":"dead","code":500}}\n\n', "error event"),
        (ROLE + b"data: {oops\n\n" + LAST + DONE, "unreadable event"),
        (b"", "no [DONE]"),
    ],
)
def test_incomplete_answers_fail_by_name(answer: bytes, kind: str) -> None:
    assert read(answer).error() == kind


def test_error_event_keeps_what_the_service_said() -> None:
    stream = read(TOKEN + b'data: {"error":{"message":"The engine died.","code":500}}\n\n')
    assert stream.error() == "error event"
    assert stream.detail == "The engine died."


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"Too many.","type":"t"}}',
        b'{"message":"Too many."}',
        b'{"detail":"Too many."}',
        b"Too many.",
    ],
)
def test_status_and_reason_of_a_refusal_are_kept(body: bytes) -> None:
    stream = read(body, status=429, kind=b"application/json")
    assert (stream.error(), stream.detail) == ("status 429", "Too many.")


def test_answer_that_does_not_stream_is_no_success() -> None:
    assert read(b'{"choices":[]}', kind=b"application/json").error() == "not a stream"
