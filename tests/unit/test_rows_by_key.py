from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.rows.digest import RowsByKey, SortedKeys

LARGEST_ROW = 2**40 - 2


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, LARGEST_ROW)), max_size=60))
def test_it_gives_what_a_dict_gives(entries: list[tuple[str, int]]) -> None:
    known: dict[str, int] = {}
    rows = RowsByKey()
    for key, row in entries:
        known.setdefault(key, row)
        rows.setdefault(key, row)
    assert len(rows) == len(known)
    assert {key: rows.get(key) for key in known} == known
    assert rows.get("none of these") is None


def test_it_grows_and_takes_at_most_48_bytes_per_key() -> None:
    keys = [f"key {n}" for n in range(20_000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        rows = RowsByKey()
        for row, key in enumerate(keys):
            rows.setdefault(key, row)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [rows.get(key) for key in keys] == list(range(len(keys)))
    assert after - before < 48 * len(keys) + 1_000


@given(st.lists(st.tuples(st.text(max_size=2), st.integers(0, 2**64 - 1)), max_size=60))
def test_sorted_keys_give_all_numbers_of_a_key_in_order(entries: list[tuple[str, int]]) -> None:
    keys = SortedKeys()
    for key, number in entries:
        keys.add(key, number)
    keys.sort()
    for key in {"none of these", *(key for key, _ in entries)}:
        found = [keys.numbers[slot] for slot in keys.slots(key)]
        assert found == [number for other, number in entries if other == key]
