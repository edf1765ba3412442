"""What a gateway believes to be in its replicas' caches."""

from __future__ import annotations

import pytest

from penstock.serve.fleet.replica import Replica
from penstock.serve.routing import prefix_index
from penstock.serve.routing.prefix_hashes import ENDS
from penstock.serve.routing.prefix_index import PrefixIndex
from penstock.transport.address import Address

TOKENS = 1024  # of a prompt of 4 KB
BLOCKS = sum(1 for end in ENDS if end <= 4 * TOKENS)


def replica(name: str, kv_tokens: int = 100_000) -> Replica:
    return Replica("m", Address(name, "node", None, None, None, ""), kv_tokens=kv_tokens)


def prompt(number: int) -> tuple[int, ...]:
    return tuple((number, block).__hash__() for block in range(BLOCKS))


def test_who_was_sent_a_prompt_is_known_by_each_of_its_beginnings():
    memory, one = PrefixIndex(), replica("one")
    memory.add(prompt(1), TOKENS, one, 0.0)
    longer = (*prompt(1)[:3], 77, 78)
    assert memory.known(prompt(1)) == BLOCKS
    assert memory.known(longer) == 3
    assert memory.holders(longer[2]) == (one,)
    assert memory.holders(longer[3]) == ()


def test_the_latest_to_be_sent_it_comes_first():
    memory, one, two = PrefixIndex(), replica("one"), replica("two")
    for holder in (one, two, one):
        memory.add(prompt(1), TOKENS, holder, 0.0)
    assert memory.holders(prompt(1)[0]) == (two, one)


def test_a_replica_keeps_no_more_than_its_cache_holds_and_forgets_the_least_recently_used():
    memory, one, two = PrefixIndex(), replica("one", kv_tokens=5 * TOKENS), replica("two")
    memory.add(prompt(0), TOKENS, two, 0.0)
    for number in (0, 1, 2, 3, 0, 4):  # an answer goes with each, so that four prompts fit
        memory.add(prompt(number), TOKENS, one, 0.0)
    assert [one in memory.holders(prompt(n)[-1]) for n in range(5)] == [True, False, True, True, True]
    assert memory.holders(prompt(0)[0]) == (one, two)


def test_what_is_too_much_is_cut_to_what_was_asked_for_and_not_more_often():
    one = replica("one")
    memory = PrefixIndex(most_tokens=5 * TOKENS, cut_to_tokens=3 * TOKENS, cut_every_s=30)

    def remembered(*times: float) -> int:
        """Whole prompts, after one was sent at each of these times."""
        for now in times:
            memory.add(prompt(round(now)), TOKENS, one, now)
        return sum(memory.known(prompt(n)) == BLOCKS for n in range(60))

    assert remembered(0, 1, 2, 3) == 4
    assert remembered(4) == 2  # an answer goes with each: the third is beyond the limit
    assert remembered(5, 6, 7, 8) == 6
    assert remembered(33) == 7
    assert remembered(34) == 2


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    memory, one = PrefixIndex(), replica("one", kv_tokens=2 * TOKENS)
    memory.add(prompt(1), TOKENS, one, 0.0)
    memory.add(prompt(2), TOKENS, one, 0.0)
    assert 0 < memory.known(prompt(1)) < BLOCKS
    assert memory.known(prompt(2)) == BLOCKS


def test_what_was_not_used_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_index, "EXPIRY_S", 100)
    memory, one = PrefixIndex(), replica("one")
    memory.add(prompt(1), TOKENS, one, 0.0)
    memory.add(prompt(2), TOKENS, one, 99.0)
    memory.add(prompt(3), TOKENS, one, 101.0)
    assert [memory.known(prompt(n)) for n in (1, 2)] == [0, BLOCKS]


def test_a_replica_that_is_gone_is_forgotten():
    memory, one, two = PrefixIndex(), replica("one"), replica("two")
    memory.follow((one, two))
    for holder in (one, two):
        memory.add(prompt(1), TOKENS, holder, 0.0)
    memory.follow((two,))
    assert memory.holders(prompt(1)[0]) == (two,)
    memory.follow(())
    assert len(memory) == memory.known(prompt(1)) == 0


def test_its_size_is_bounded_whatever_the_replicas_hold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_index, "ENTRIES", 1000)
    memory = PrefixIndex()
    replicas = [replica(str(n), kv_tokens=10**9) for n in range(10)]
    for number in range(2000):
        memory.add(prompt(number), TOKENS, replicas[number % 10], 0.0)
    assert 900 < len(memory) <= 1000
