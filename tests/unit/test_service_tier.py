"""Classes of work: which words name them, and how responses report them."""

import json

import pytest

from penstock import tiers
from penstock.errors import BadRequest

pytestmark = pytest.mark.parity("X1")

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("word", "tier"),
    [
        ("auto", "default"),
        ("default", "default"),
        ("scale", "default"),
        ("flex", "flex"),
        ("priority", "priority"),
        ("fast", "priority"),
    ],
)
def test_the_words_of_openai(word: str, tier: str):
    assert tiers.of_body(json.dumps(word).encode(), CHAT) == tier
    assert tiers.of_header(word.upper().encode()) == tier


def test_none_at_all_names_no_class():
    assert tiers.of_body(b"", CHAT) is None
    assert tiers.of_body(b"null", CHAT) is None
    assert tiers.of_header(None) is None


def test_a_word_of_anthropic_is_one_only_there():
    assert tiers.of_body(b'"standard_only"', MESSAGES) == "default"
    with pytest.raises(BadRequest, match="allowed are 'auto', 'default', 'scale', 'flex'"):
        tiers.of_body(b'"standard_only"', CHAT)


@pytest.mark.parametrize("odd", [b'"batch"', b"7", b'{"a": 1}', b'"\xff"', b'["flex"]'])
def test_anything_else_is_refused_with_what_is_allowed(odd: bytes):
    with pytest.raises(BadRequest, match="'flex'") as refusal:
        tiers.of_body(odd, CHAT)
    assert refusal.value.facts["param"] == "service_tier"


def test_a_response_reports_its_class_once():
    whole = tiers.reported(b'{"id":"a","service_tier":null,"choices":[]}', "flex", CHAT)
    assert json.loads(whole) == {"id": "a", "service_tier": "flex", "choices": []}
    assert whole.count(b"service_tier") == 1


def test_a_message_reports_it_in_its_usage_in_the_words_of_anthropic():
    whole = tiers.reported(b'{"id":"a","usage":{"input_tokens":3}}', "flex", MESSAGES)
    assert json.loads(whole) == {"id": "a", "usage": {"input_tokens": 3, "service_tier": "batch"}}


def test_a_stream_reports_it_in_its_first_event():
    piece = b'data: {"id":"a"}\n\ndata: {"id":"a","n":1}\n\n'
    first, second = tiers.reported_event(piece, "flex", CHAT).split(b"\n\n")[:2]
    assert json.loads(first[6:]) == {"id": "a", "service_tier": "flex"}
    assert second == b'data: {"id":"a","n":1}'


def test_a_stream_of_a_message_reports_it_in_its_start():
    piece = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n'
    event = tiers.reported_event(piece, "default", MESSAGES)
    assert event.startswith(b"event: message_start\ndata: {")
    message = json.loads(event.split(b"data: ")[1])["message"]
    assert message["usage"] == {"input_tokens": 3, "service_tier": "standard"}


@pytest.mark.parametrize("piece", [b"data: [DONE]\n\n", b": ping\n\n", b"", b"data: {broken\n\n"])
def test_what_is_no_object_stays_as_it_is(piece: bytes):
    if piece.startswith(b"data: {"):
        assert tiers.reported_event(piece, "flex", MESSAGES) == piece
    else:
        assert tiers.reported_event(piece, "flex", CHAT) == piece
    assert tiers.reported(b"[1]", "flex", CHAT) == b"[1]"
