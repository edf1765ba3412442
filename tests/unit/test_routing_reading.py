"""What routing reads of a request: prompts of all shapes, sessions, adapters, sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.serve.fleet.table import Table
from penstock.serve.gateway import body
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.routing_features import FeatureReader
from penstock.serve.routing import RoutingRequest, policy
from penstock.serve.routing.prefix_hashes import ENDS, HASHED_BYTES, blocks, home
from penstock.transport.address import Address
from penstock.transport.link import Hello

LONG = "It was a dark and stormy night. " * 100
PIXELS = "data:image/png;base64," + "iVBORw0KGgo" * 500
TOOL = {"type": "function", "function": {"name": "act", "description": LONG, "parameters": {}}}


def asked(
    request: Any,
    name: str = "prefix_affinity",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    replicas: int = 2,
    **card: Any,
) -> RoutingRequest:
    content = json.dumps(request).encode() if not isinstance(request, bytes) else request
    fields = body.fields(content)
    made = ServedModel("m", 1, adapter_slots=4, **card)
    _, adapter = Catalogue([made], None).resolve(fields.model)
    return FeatureReader(made, policy(name), table(replicas)).read(adapter, fields, headers, len(content))


def table(replicas: int) -> Table:
    made = Table("node")
    names = [str(i) for i in range(replicas)]
    made.set_members("m", {name: Address(name, "node", None, None, None, "") for name in names})
    for replica in made.members("m"):
        made.hello(replica, Hello("m", 32_768))
    return made


def shared(one: Any, other: Any) -> int:
    """Blocks that two requests have in common, from the first on."""
    first, second = asked(one).blocks, asked(other).blocks
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return {
        "model": "m",
        "messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)],
        **more,
    }


SHAPES: dict[str, tuple[Any, Any, Any]] = {  # a prompt, the same with more behind it, another one
    "chat": (chat("Be kind.", LONG), chat("Be kind.", LONG, "Yes.", "And then?"), chat("Be rude.", LONG)),
    "content parts": (
        chat([{"type": "text", "text": LONG}]),
        chat([{"type": "text", "text": LONG}], "Go on."),
        chat([{"type": "text", "text": "No. " + LONG}]),
    ),
    "images": (
        chat("Look.", [{"type": "image_url", "image_url": {"url": PIXELS}}]),
        chat("Look.", [{"type": "image_url", "image_url": {"url": PIXELS}}], "A cat."),
        chat("Look.", [{"type": "image_url", "image_url": {"url": PIXELS.replace("png", "jpg")}}]),
    ),
    "tools": (
        chat("Act.", "Now.", tools=[TOOL]),
        chat("Act.", "Now.", "Done.", tools=[TOOL]),
        chat("Act.", "Now.", tools=[{**TOOL, "type": "other"}]),
    ),
    "text": ({"prompt": LONG}, {"prompt": LONG + "And then?"}, {"prompt": "No. " + LONG}),
    "texts": ({"prompt": [LONG, "x"]}, {"prompt": [LONG, "x", "y"]}, {"prompt": ["x", LONG]}),
    "token ids": (
        {"prompt": list(range(900))},
        {"prompt": list(range(1000))},
        {"prompt": list(range(1, 900))},
    ),
    "lists of token ids": (
        {"prompt": [list(range(900)), [1]]},
        {"prompt": [list(range(900)), [1], [2]]},
        {"prompt": [[1], list(range(900))]},
    ),
    "responses": (
        {"instructions": "Be kind.", "input": LONG},
        {"instructions": "Be kind.", "input": LONG + "And then?"},
        {"instructions": "Be rude.", "input": LONG},
    ),
    "messages of Anthropic": (
        {"system": "Be kind.", **chat("", LONG)},
        {"system": "Be kind.", **chat("", LONG, "Yes.")},
        {"system": "Be rude.", **chat("", LONG)},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_prefixes_have_equal_blocks_and_others_have_not(shape):
    one, more, other = SHAPES[shape]
    count = len(asked(one).blocks)
    assert count > 5
    assert shared(one, more) >= count - 1  # the last may hold the bracket that closed the shorter one
    assert shared(one, other) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_all_turns_of_a_conversation_have_one_home_and_others_have_another(shape):
    one, more, other = SHAPES[shape]
    assert asked(one).home == asked(more).home != asked(other).home


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": []},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": None},
        {"prompt": [[]]},
        {"messages": "nonsense", "prompt": 7},
        {"file": "x"},
        chat("Hi."),
        b"",
        b"{}",
    ],
)
def test_what_has_no_prompt_to_speak_of_has_no_blocks_and_no_home(request_body):
    read = asked(request_body)
    assert (read.blocks, read.home) == ((), 0)


def test_adapters_and_cache_salts_share_nothing():
    plain = chat("Be kind.", LONG)
    assert shared(plain, plain | {"model": "m:poet"}) == 0
    assert shared(plain, plain | {"cache_salt": "mine"}) == 0
    assert shared(plain | {"cache_salt": "mine"}, plain | {"cache_salt": "mine"}) > 5


def test_the_adapter_is_what_stands_behind_the_model():
    assert [asked(chat("x") | {"model": name}).adapter for name in ("m", "m:poet", "m:a:b")] == [
        "",
        "poet",
        "a:b",
    ]


def test_tokens_are_estimated_by_size_up_to_the_context_window():
    assert asked({"prompt": "x" * 40_000}).tokens == pytest.approx(10_000, rel=0.01)
    assert asked({"prompt": "x" * 400_000}).tokens == 32_768


@pytest.mark.parametrize(
    ("said", "headers", "session"),
    [
        ({}, ((b"x-session-id", b"talk-7"),), "talk-7"),
        ({"user": "ann", "prompt_cache_key": "talk"}, (), '"talk"'),
        ({"user": "ann"}, (), '"ann"'),
        ({"user": None, "prompt_cache_key": ""}, (), ""),
        ({"user": {"name": "ann"}}, (), '{"name": "ann"}'),
        ({"user": "ann"}, ((b"x-session-id", b""),), '"ann"'),
        ({}, (), ""),
    ],
)
def test_a_session_is_named_by_the_header_then_by_the_body(said, headers, session):
    assert asked(chat("x") | said, "session_affinity", headers).session == session


def test_the_session_header_is_the_configured_one():
    headers = ((b"x-chat", b"talk-7"), (b"x-session-id", b"other"))
    assert asked(chat("x"), "session_affinity", headers, session_header="x-chat").session == "talk-7"


@pytest.mark.parametrize("name", ["power_of_two", "session_affinity", "least_loaded"])
def test_only_a_policy_that_reads_prompts_has_them_read(name):
    assert asked(chat(LONG), name).blocks == ()


def test_with_one_replica_and_none_to_come_nothing_is_read():
    assert asked(chat(LONG), replicas=1, scales=False).blocks == ()
    assert asked(chat(LONG), replicas=1, scales=True).blocks
    assert asked(chat(LONG), replicas=2, scales=False).blocks


def test_the_beginning_decides_however_long_a_prompt_is():
    huge = b"x" * (10 * 2**20)
    assert len(blocks(huge)) == len(ENDS) == 56
    assert blocks(huge) == blocks(huge[:HASHED_BYTES])


def test_blocks_tell_at_least_eight_ninths_of_a_shared_prefix():
    text = LONG.encode() * 40
    for size in range(300, HASHED_BYTES, 997):
        known = max((end for end in ENDS if end <= size), default=0)
        assert known >= min(8 / 9 * size, size - 255)
        assert len(blocks(text[:size])) == ENDS.index(known) + 1


def test_a_home_is_the_same_in_every_process():
    code = f"from penstock.serve.routing.prefix_hashes import home; print(home({LONG.encode()!r}, 'poet'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == home(LONG.encode(), "poet")
