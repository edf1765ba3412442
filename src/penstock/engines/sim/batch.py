"""Continuous batching on a virtual clock: which request makes a token in which step, and how long it takes.

Pure: no event loop and no real time, so that the model can be tested to the microsecond; `scheduler` runs it
in real time. The rules are those of vLLM's scheduler: running requests go first, long prompts are prefilled
in chunks, a request is admitted when all of its prompt fits, and when the KV cache is full the newest one is
preempted. It is prefilled again later, except for blocks that are still cached. With `scheduling_policy:
priority`, those of a lower priority number are admitted first, and the newest of the highest is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

from penstock.engine import Load, p99_lately
from penstock.engines.sim.cache import Block, Cache, Hashes
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.request_context import EngineTimings


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of one request. Units: tokens; `arrival` in seconds of the batch's clock.

    The step that has computed the KV of all `prompt_tokens` and all `made` tokens makes the next one.
    cached_tokens: how much of the prompt was in the cache when it was first admitted. scheduled: the time of
    that; first_token and last_token: when these were made.
    """

    prompt_tokens: int
    reply: PlannedReply
    hashes: Hashes
    arrival: float
    index: int = 0
    priority: int = 0
    made: int = 0
    computed: int = 0
    cached_tokens: int = 0
    preempted: bool = False
    blocks: list[Block] = field(default_factory=list[Block])
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def spent(self) -> EngineTimings:
        """Its timings so far."""
        return EngineTimings.between(self.arrival, self.scheduled, self.first_token, self.last_token)

    @property
    def rank(self) -> tuple[int, float]:
        """Where classes count: those of a lower rank go first."""
        return self.priority, self.arrival

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one is made: 1 while it decodes."""
        return self.prompt_tokens + self.made - self.computed


@dataclass(slots=True)
class Counts:
    """Totals since the start. Units: tokens; `finished` and `preemptions` in requests.

    queries, hits: lookups in the prefix cache; as in vLLM, a preempted request is not counted again.
    """

    prompt_tokens: int = 0
    made_tokens: int = 0
    finished: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0


class Batch:
    """Running and waiting requests. A step admits no request that arrives after it began."""

    def __init__(self, options: SimOptions) -> None:
        self.counts = Counts()
        self._options = options
        self._by_class = options.scheduling_policy == "priority"
        self.forget()
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._work: dict[Sequence, int] = {}
        self._now = 0.0
        self._lately_s = 0.0
        self.admits = True
        """Whether waiting requests are admitted; running ones go on."""

    def submit(self, sequence: Sequence) -> None:
        """Queues it. Sequences must come in the order of their arrivals."""
        position = len(self._waiting)
        while self._by_class and position and self._waiting[position - 1].rank > sequence.rank:
            position -= 1
        self._waiting.insert(position, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a running or waiting sequence and frees its blocks."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._work.pop(sequence, None)
            self._cache.free(sequence.blocks)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def idle(self) -> bool:
        return not self._running and not (self._waiting and self.admits)

    @property
    def running(self) -> int:
        return len(self._running)

    def forget(self) -> None:
        """Empties the prefix cache. Only while nothing runs."""
        options = self._options
        self._cache = Cache(options.kv_blocks, options.block_size, options.enable_prefix_caching)

    def load(self) -> Load:
        waiting_tokens = 0
        for sequence in chain(self._waiting, self._running):  # often asked for
            if not sequence.made:
                waiting_tokens += sequence.prompt_tokens - sequence.computed
        running, waiting, seats = len(self._running), len(self._waiting), self._options.max_num_seqs
        return Load(running, waiting, waiting_tokens, self._cache.usage, 0, self._lately_s, seats)

    def begin_step(self) -> float:
        """Schedules the next step; returns when it ends, in seconds of the clock. Only when not `idle`."""
        if not self._running:
            self._now = max(self._now, min(sequence.arrival for sequence in self._waiting))
        preemptions = self.counts.preemptions
        budget = self._continue_running(self._options.max_num_batched_tokens)
        if self.counts.preemptions == preemptions:
            self._admit(budget)
        step_s = self._step_s()
        self._lately_s = p99_lately(self._lately_s, step_s)
        self._now += step_s
        return self._now

    def work(self) -> Collection[tuple[Sequence, int]]:
        """The tokens of each sequence in the step that has begun."""
        return self._work.items()

    def end_step(self) -> list[Sequence]:
        """The sequences that made a token in the step; completed ones have left the batch."""
        emitted: list[Sequence] = []
        for sequence, tokens in self._work.items():
            sequence.computed += tokens
            if sequence.computed == sequence.prompt_tokens + sequence.made:
                sequence.made += 1
                sequence.last_token = self._now
                emitted.append(sequence)
                if sequence.first_token is None:
                    sequence.first_token = self._now
        self._work.clear()
        for sequence in emitted:
            if sequence.made == sequence.reply.tokens:
                self.remove(sequence)
        return emitted

    def _continue_running(self, budget: int) -> int:
        """Gives running sequences their tokens of the step, oldest first; returns the rest of `budget`."""
        position = 0
        while position < len(self._running) and budget:
            sequence = self._running[position]
            tokens = min(sequence.pending, budget)
            if not self._take(sequence, tokens):
                victim = self._victim()
                preempted = self._preempt(victim)
                if victim == position:  # vLLM schedules no other in this step
                    return budget
                if victim < position:
                    budget += self._work.pop(preempted)
                    position -= 1
                continue
            budget -= tokens
            position += 1
        return budget

    def _admit(self, budget: int) -> None:
        while self._waiting and budget and self.admits and len(self._running) < self._options.max_num_seqs:
            sequence = next((one for one in self._waiting if one.arrival <= self._now), None)
            if sequence is None:
                return
            blocks = self._cache.admit(sequence.hashes, sequence.prompt_tokens + sequence.made)
            if blocks is None:
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            if sequence.scheduled is None:
                sequence.scheduled = self._now
            self._reuse(sequence, blocks)
            tokens = min(sequence.pending, budget)
            self._take(sequence, tokens)
            budget -= tokens

    def _reuse(self, sequence: Sequence, blocks: list[Block]) -> None:
        sequence.blocks = blocks
        sequence.computed = len(blocks) * self._options.block_size
        if self._options.enable_prefix_caching and not sequence.preempted:
            sequence.cached_tokens = sequence.computed
            self.counts.queries += sequence.prompt_tokens
            self.counts.hits += sequence.computed

    def _take(self, sequence: Sequence, tokens: int) -> bool:
        begin, size = sequence.computed, self._options.block_size
        inside = tokens == 1 and 0 < begin % size < size - 1  # of a block: the usual case of a step
        if not inside and not self._cache.extend(sequence.blocks, sequence.hashes, begin, begin + tokens):
            return False
        self._work[sequence] = tokens
        return True

    def _victim(self) -> int:
        """Which of those that run gives way: the newest, of the last class."""
        positions = range(len(self._running))
        if not self._by_class:
            return positions[-1]
        return max(positions, key=lambda position: (self._running[position].rank, position))

    def _preempt(self, position: int) -> Sequence:
        """Takes a running sequence back to those that wait, before all others of its rank."""
        sequence = self._running.pop(position)
        self._cache.free(sequence.blocks)
        sequence.computed = 0
        sequence.preempted = True
        self.counts.preemptions += 1
        before = (
            at for at, one in enumerate(self._waiting) if not self._by_class or one.rank >= sequence.rank
        )
        self._waiting.insert(next(before, len(self._waiting)), sequence)
        return sequence

    def _step_s(self) -> float:
        options = self._options
        decoding = prefilling = context = 0
        attended = 0.0
        for sequence, tokens in self._work.items():
            if tokens == 1 and sequence.made:
                decoding += 1
                context += sequence.computed
            else:
                prefilling += tokens
                attended += tokens * (sequence.computed + tokens / 2)
        milliseconds = options.step_base_ms + options.step_per_request_ms * decoding
        nanoseconds = options.step_per_kv_token_ns * context + options.prefill_per_kv_token_ns * attended
        return milliseconds / 1e3 + nanoseconds / 1e9 + prefilling / options.prefill_tokens_per_s
