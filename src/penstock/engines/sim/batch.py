"""Continuous batching on a virtual clock: which request makes a token in which step, and how long it takes.

Pure: no event loop and no real time, so that the model can be tested to the microsecond; `clock` lets real
time follow it. The rules are vLLM's in small: running requests go first, long prompts are prefilled in
chunks, the newest request gives way when the KV cache is full and is prefilled again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.engine import Load
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import Reply


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of one request. Units: tokens; `arrival` in seconds of the batch's clock.

    Its next token is made by the step that has computed the KV of all `prompt_tokens` and all `made` ones.
    """

    prompt_tokens: int
    reply: Reply
    arrival: float
    index: int = 0
    made: int = 0
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one is made: 1 while it decodes."""
        return self.prompt_tokens + self.made - self.computed


class Batch:
    """Requests that run and requests that wait. A step takes in no request that comes after it began."""

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._work: dict[Sequence, int] = {}
        self._kv_tokens = 0
        self._now = 0.0

    def submit(self, sequence: Sequence) -> None:
        """Queue it. Sequences must come in the order of their arrivals."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget it, wherever it is; its part of the KV cache is free again."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._kv_tokens -= sequence.computed + self._work.pop(sequence, 0)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def idle(self) -> bool:
        return not self._running and not self._waiting

    def load(self) -> Load:
        prompts = [s for s in (*self._waiting, *self._running) if not s.made]
        kv_usage = self._kv_tokens / self._options.kv_tokens
        return Load(len(self._running), len(self._waiting), sum(s.pending for s in prompts), kv_usage)

    def begin_step(self) -> float:
        """Schedule the next step; when it ends, in seconds of the clock. Only when not `idle`."""
        if not self._running:
            self._now = max(self._now, self._waiting[0].arrival)
        budget = self._continue_running(self._options.max_num_batched_tokens)
        self._admit(budget)
        self._now += self._step_s()
        return self._now

    def end_step(self) -> list[Sequence]:
        """The sequences that have made a token in the step; those that are complete have left the batch."""
        emitted: list[Sequence] = []
        for sequence, tokens in self._work.items():
            sequence.computed += tokens
            if sequence.pending == 0:
                sequence.made += 1
                emitted.append(sequence)
        self._work.clear()
        for sequence in emitted:
            if sequence.made == sequence.reply.tokens:
                self.remove(sequence)
        return emitted

    def _continue_running(self, budget: int) -> int:
        """Give running sequences their part of the step, oldest first; what is left of `budget` tokens."""
        position = 0
        while position < len(self._running) and budget:
            sequence = self._running[position]
            tokens = min(sequence.pending, budget)
            if self._kv_tokens + tokens > self._options.kv_tokens:
                self._preempt_newest()
                continue
            self._take(sequence, tokens)
            budget -= tokens
            position += 1
        return budget

    def _admit(self, budget: int) -> None:
        while self._waiting and budget and len(self._running) < self._options.max_num_seqs:
            sequence = self._waiting[0]
            fits = self._kv_tokens + sequence.pending <= self._options.kv_tokens
            if sequence.arrival > self._now or not fits:
                return
            self._running.append(self._waiting.popleft())
            tokens = min(sequence.pending, budget)
            self._take(sequence, tokens)
            budget -= tokens

    def _take(self, sequence: Sequence, tokens: int) -> None:
        self._work[sequence] = tokens
        self._kv_tokens += tokens

    def _preempt_newest(self) -> None:
        sequence = self._running.pop()
        self._kv_tokens -= sequence.computed
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def _step_s(self) -> float:
        decoding = sum(1 for sequence in self._work if sequence.made and sequence.pending == 1)
        prefilling = sum(self._work.values()) - decoding
        milliseconds = self._options.step_base_ms + self._options.step_per_request_ms * decoding
        return milliseconds / 1e3 + prefilling / self._options.prefill_tokens_per_s
