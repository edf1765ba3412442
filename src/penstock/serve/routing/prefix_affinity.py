"""The replica with the longest cached prefix of the prompt, unless its queued work outweighs that, or the
prefix is popular and another cache has received far fewer new tokens.

The engine's cache is not queried: the gateway remembers what it sent where, as hashes of prompt prefixes.
What other gateways have sent is presumed: each prompt's hash gives it a home replica, the same in all
gateways.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.config.schema.request_router import PrefixRouterOptions
from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.hash_ring import AdapterRing, Ring
from penstock.serve.routing.load_bounds import share, some, two
from penstock.serve.routing.policy import Pick, RoutingRequest
from penstock.serve.routing.prefix_index import UP_TO, Holders, PrefixIndex
from penstock.transport.link import BYTES_PER_TOKEN

SAVED = 4
"""Value of a cached prompt token, in tokens of queued work. More than one: recomputing it costs the whole
fleet, and space in one more cache. docs/inside/routing.md has figures.
"""

_STARTS = 8
"""New prompts with a common prefix for each replica that has it, before another may compute it, too."""

_LESS_FILLED = 2  # times: how many fewer new tokens that other replica must have got lately
_NEW = 1 / 64
"""Cost of a token that is new to a cache, in tokens of queued work: hardly more than a tie-break."""

_WEIGHED = 8  # holders at one pick
_LEVELS = 3  # sets of holders at one pick, from the longest match on


class PrefixAffinity:
    """Minimizes queued work minus cached tokens; a replica beyond its share saves nothing."""

    reads = ("prompt",)

    def __init__(self, **options: Any) -> None:
        """options: those of `PrefixRouterOptions`. The size of a replica's cache limits what is remembered,
        too.
        """
        given = PrefixRouterOptions(**options)
        most_chars = given.eviction_threshold_chars if given.do_eviction else math.inf
        most, cut_to = (
            chars / BYTES_PER_TOKEN for chars in (most_chars, given.eviction_target_chars or most_chars)
        )
        self._index = PrefixIndex(most, cut_to, given.eviction_interval_secs or 0)
        self._most_busier = math.inf if given.imbalanced_threshold is None else given.imbalanced_threshold
        self._least_match = given.match_rate_threshold
        self._ring = Ring()
        self._adapters = AdapterRing()

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        self._index.follow(candidates.members)
        if asked.adapter and (pick := self._pick_for_adapter(asked, candidates)):
            return pick
        spare = self._less_loaded(two(candidates), now)
        most = min(share(candidates, spare), spare.busy + self._most_busier + 1)
        homes = self._homes(asked, candidates, most) if asked.home else ()
        known = asked.blocks[: self._index.known(asked.blocks)]
        if known and self._worth_a_copy(known, spare, now):
            return Pick(spare, "spread")
        best = Pick(self._less_loaded(homes, now) if len(homes) == 2 else spare)
        least = self._load(best.replica, now)
        for replica, tokens, why in self._savings(asked, known, candidates, homes):
            cost = self._load(replica, now) - SAVED * tokens
            if cost < least and replica.busy + 1 <= most:
                best, least = Pick(replica, why, round(tokens)), cost
        return best

    def _worth_a_copy(self, known: tuple[int, ...], other: Replica, now: float) -> bool:
        """Whether `other` should compute a popular prefix again: the caches that have it fill faster."""
        index = self._index
        holders = index.holders(known[-1])
        if other in holders or index.starts(known[-1]) < _STARTS * len(holders):
            return False
        least_new = _LESS_FILLED * (index.new_tokens(other, now) + UP_TO[len(known)])
        load = self._load(other, now)
        return all(
            index.new_tokens(holder, now) > least_new and self._load(holder, now) > load
            for holder in some(holders, _WEIGHED)
        )

    def _load(self, replica: Replica, now: float) -> float:
        return replica.load_tokens + _NEW * self._index.new_tokens(replica, now)

    def _less_loaded(self, replicas: Sequence[Replica], now: float) -> Replica:
        first, second = replicas
        return second if self._load(second, now) < self._load(first, now) else first

    def _pick_for_adapter(self, asked: RoutingRequest, candidates: Candidates) -> Pick | None:
        """None when all replicas with the adapter are full and all others beyond their share."""
        most = share(candidates)
        known = self._holding(asked.blocks[: self._index.known(asked.blocks)], candidates)
        saved = {replica: tokens for replica, tokens in known if replica.busy + 1 <= most}
        weighed = {replica: SAVED * tokens for replica, tokens in saved.items()}
        pick = self._adapters.pick(asked.adapter, candidates, weighed)
        return pick and pick._replace(saved_tokens=saved.get(pick.replica, 0))

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        """Remembers."""
        if asked.blocks:
            self._index.add(asked.blocks, asked.tokens, replica, now)

    def _homes(self, asked: RoutingRequest, candidates: Candidates, most: float) -> Sequence[Replica]:
        """The prompt's first two replicas on the ring that are candidates."""
        self._ring.follow(candidates.members)
        return [r for r in self._ring.after(asked.home, 2) if r in candidates and r.busy + 1 <= most]

    def _savings(
        self,
        asked: RoutingRequest,
        known: tuple[int, ...],
        candidates: Candidates,
        homes: Sequence[Replica],
    ) -> Iterator[tuple[Replica, float, str]]:
        """Replicas that probably cache part of the prompt, how many tokens, and why.

        The more requests come from other gateways, the likelier one of them has sent this prompt to its home.
        """
        for replica, tokens in self._holding(known, candidates):
            if tokens >= self._least_match * asked.tokens:
                yield replica, tokens, "affinity"
        if homes and candidates.elsewhere:
            yield homes[0], asked.tokens * candidates.elsewhere / candidates.busy, "home"

    def _holding(self, known: tuple[int, ...], candidates: Candidates) -> Iterator[tuple[Replica, int]]:
        """Replicas that were sent part of the prompt, longest prefix first."""
        seen: Holders = ()
        weighed = levels = 0
        for i in reversed(range(len(known))):
            holders = self._index.holders(known[i])
            if holders == seen:
                continue
            for replica in some(holders, _WEIGHED):
                if replica in candidates and replica not in seen:
                    yield replica, UP_TO[i + 1]
                    weighed += 1
            seen, levels = holders, levels + 1
            if weighed >= _WEIGHED or levels >= _LEVELS:
                return
