"""Serve's list of replicas reaches who follows it, whichever comes first: the list or the follower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.serve.fleet import membership
from penstock.serve.fleet.membership import Members
from penstock.transport.address import Address

ONE, TWO = ({name: Address(name, "node", f"\0{name}", None, None, "")} for name in ("one", "two"))
Followed = Callable[[str], list[Members]]


class Handle(SimpleNamespace):
    """One is not another, as with Serve's."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Followed:
    """Follows a model of an application; what is heard appears in the list."""
    monkeypatch.setattr(membership, "_watchers", {})
    monkeypatch.setattr(membership, "_latest", {})

    def make(application: str) -> list[Members]:
        heard: list[Members] = []
        handle: Any = Handle(app_name=application, options=lambda **_: None)
        membership.follow("m", handle, heard.append)
        return heard

    return make


async def test_what_was_published_before_is_heard(follow: Followed):
    """As when a request wakes a replica by handle, before the gateway follows it."""
    membership.publish("m", "app", ONE)
    membership.publish("m", "app", TWO)
    heard = follow("app")
    await asyncio.sleep(0)
    assert heard == [TWO]


async def test_changes_are_heard_from_the_routers_thread_in_their_order(follow: Followed):
    membership.publish("m", "app", ONE)
    heard = follow("app")
    await asyncio.to_thread(membership.publish, "m", "app", TWO)
    await asyncio.to_thread(membership.publish, "m", "app", {})
    await asyncio.sleep(0)
    assert heard == [ONE, TWO, {}]


async def test_nothing_is_heard_after_the_end_of_following(monkeypatch: pytest.MonkeyPatch):
    """A list that was on its way would bring replicas of a model back that has been removed."""
    monkeypatch.setattr(membership, "_watchers", {})
    monkeypatch.setattr(membership, "_latest", {})
    heard: list[Members] = []
    handle: Any = Handle(app_name="app", options=lambda **_: None)
    membership.follow("m", handle, heard.append)
    membership.publish("m", "app", ONE)
    await asyncio.sleep(0)
    membership.publish("m", "app", TWO)
    membership.unfollow("m", handle)
    await asyncio.sleep(0)
    assert heard == [ONE]


async def test_other_applications_and_models_are_not_heard(follow: Followed):
    membership.publish("m", "other", ONE)
    membership.publish("other", "app", ONE)
    heard = follow("app")
    await asyncio.sleep(0)
    assert heard == []


async def test_all_who_follow_hear_what_is_known_and_each_change(follow: Followed):
    first = follow("app")
    membership.publish("m", "app", ONE)
    second = follow("app")
    membership.publish("m", "app", TWO)
    await asyncio.sleep(0)
    assert (first, second) == ([ONE, TWO], [ONE, TWO])
