"""The ring: where keys lie, and how few move."""

import itertools

import pytest

from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.hash_ring import Ring, hash_of
from penstock.transport.address import Address

KEYS = [hash_of(f"key {i}") for i in range(5000)]


def replicas(count: int) -> tuple[Replica, ...]:
    return tuple(Replica("m", Address(f"replica-{i}", "node", None, None, None, "")) for i in range(count))


def ring(members: tuple[Replica, ...]) -> Ring:
    made = Ring()
    made.follow(members)
    return made


def homes(made: Ring) -> list[str]:
    return [next(made.after(key, 1)).id for key in KEYS]


def test_every_gateway_has_the_same_ring_whatever_order_members_came_in():
    members = replicas(10)
    grown = Ring()
    for count in (3, 7, 10):
        grown.follow(members[:count])
    assert homes(grown) == homes(ring(members[::-1]))


@pytest.mark.parametrize("count", [4, 16, 100])
def test_about_one_key_in_n_moves_when_a_replica_leaves_or_joins_and_none_between_the_others(count):
    members = replicas(count)
    before, after = homes(ring(members)), homes(ring(members[:-1]))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {members[-1].id}
    assert len(moved) < 2 * len(KEYS) / count


def test_a_replica_that_comes_back_has_its_keys_again():
    members = replicas(10)
    made = ring(members)
    before = homes(made)
    made.follow(members[:-1])
    made.follow(members)
    assert homes(made) == before


def test_keys_spread_over_all():
    counts = [list(group) for _, group in itertools.groupby(sorted(homes(ring(replicas(10)))))]
    assert len(counts) == 10
    assert max(map(len, counts)) < 1.6 * len(KEYS) / 10


def test_the_way_along_the_ring_meets_each_replica_once():
    members = replicas(10)
    met = list(ring(members).after(KEYS[0], 100))
    assert len(met) == 10
    assert set(met) == set(members)


def test_an_empty_ring_has_nobody():
    assert list(Ring().after(KEYS[0], 3)) == []
