"""Pages of lists: which records a client gets, in which order, and how many of them are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.jobs.parameters import Page


@dataclass(frozen=True)
class Record:
    id: str
    wanted: bool = True


RECORDS = st.lists(st.builds(Record, st.from_regex("[a-d]{1,3}", fullmatch=True), st.booleans()), max_size=20)


@given(RECORDS, st.integers(1, 5), st.booleans())
def test_pages_have_each_wanted_record_once_in_order(records: list[Record], limit: int, ascending: bool):
    store: dict[str, Any] = {record.id: record for record in records}
    seen: list[Record] = []
    more, after = True, None
    while more:
        found, more = Page(limit, after, ascending).cut(store, lambda one: one.wanted)
        assert len(found) <= limit
        assert not more or len(found) == limit
        seen += found
        after = found[-1].id if found else None
    wanted = [one for _, one in sorted(store.items()) if one.wanted]
    assert seen == (wanted if ascending else wanted[::-1])


def test_a_short_page_of_a_long_list_looks_at_few_records():
    store = {f"{number:06}": Record(f"{number:06}") for number in range(100_000)}
    looked: list[str] = []
    found, more = Page(2).cut(store, lambda one: not looked.append(one.id))
    assert ([one.id for one in found], more, len(looked)) == (["099999", "099998"], True, 3)
