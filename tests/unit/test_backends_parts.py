"""What backends share: the body made whole, and how much more an engine wants."""

from __future__ import annotations

import json

import pytest

from penstock.data.backends.limits import QueueDepth
from penstock.data.rows.request import with_fields
from penstock.engine import Load


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a": [1, 2], "model": "theirs"}\n'])
def test_fields_are_added_and_go_first(body: bytes):
    assert json.loads(with_fields(body, {"model": "m"})) == {**json.loads(body), "model": "m"}


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"{}"', b"{"])
def test_what_is_no_object_stays_as_it_is(body: bytes):
    assert with_fields(body, {"model": "m"}) == body


def test_nothing_of_a_body_changes():
    body = b'{"x": 1.10, "y": 12345678901234567890123, "z": "\\u00e9"}'
    assert with_fields(body, {"model": "m"}).startswith(body[:-1])


def test_an_idle_engine_wants_some():
    assert QueueDepth().available_slots(Load(), 0) == 16


def test_a_full_engine_with_enough_waiting_wants_none():
    assert QueueDepth().available_slots(Load(running=256, waiting=64), 320) == 0


def test_a_busy_engine_wants_a_quarter_of_what_runs_ahead():
    assert QueueDepth().available_slots(Load(running=256, waiting=10), 266) == 54


def test_an_engine_that_takes_all_at_once_is_given_more():
    assert QueueDepth().available_slots(Load(running=256), 256) == 128


def test_an_engine_out_of_memory_wants_none():
    assert QueueDepth().available_slots(Load(running=10, waiting=40, kv_usage=1.0), 30) == 0


def test_those_that_the_scheduler_has_not_seen_count_as_waiting():
    assert QueueDepth().available_slots(Load(running=16, unseen=16), 16) == 0


def test_an_engine_that_ends_all_within_a_step_wants_ever_more():
    appetite = QueueDepth()
    for _ in range(100):
        appetite.on_response(Load())
    assert appetite.available_slots(Load(), 0) == 116
    for _ in range(10_000):
        appetite.on_response(Load())
    assert appetite.available_slots(Load(), 0) == 1024


def test_an_engine_that_takes_all_that_waits_is_sent_what_it_ran_at_once_ahead():
    appetite = QueueDepth()
    for _ in range(100):
        appetite.on_response(Load(running=32))
    assert appetite.available_slots(Load(running=32), 32) == 32


def test_an_engine_that_leaves_much_waiting_wants_less_again():
    appetite = QueueDepth()
    for _ in range(100):
        appetite.on_response(Load())
    for _ in range(50):
        appetite.on_response(Load(waiting=100))
    assert appetite.available_slots(Load(), 0) == 66
