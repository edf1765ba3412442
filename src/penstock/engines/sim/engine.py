"""SimEngine: the Engine protocol over the scheduler, with the failures that its options ask for.

It runs in the replica's process; "the engine died" means that every stream ends with EngineDead and
`wait_dead` returns, as when a real engine's process is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.asgi import ASGIApp
from penstock.config.messages.problems import translated
from penstock.engine import Delta, Load, Progress, Prompt, no_progress
from penstock.engine_control import DEFAULT_WEIGHTS, PARTS, EngineControl, PauseMode
from penstock.engines import peft
from penstock.engines.prepared import prepared
from penstock.engines.sim import tokenizer, tools, wire
from penstock.engines.sim.app import App
from penstock.engines.sim.batch import Counts
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import POOLED, PlannedReply, plan
from penstock.engines.sim.scheduler import Clock, Scheduler
from penstock.engines.weights import Broken
from penstock.errors import (
    BadRequest,
    EngineDead,
    EngineStartFailed,
    Error,
    PromptTooLong,
    Unavailable,
)
from penstock.request_context import ChoiceTokens, record_tokens, tokens_before, tokens_so_far, using_adapter

if TYPE_CHECKING:
    from penstock.config import LLMConfig


def no_record(group: object) -> None:
    """Nobody could continue the answer."""


class SimEngine(EngineControl):
    """One simulated model. Its options are the config's `engine_kwargs`, see `SimOptions`."""

    def __init__(self, config: LLMConfig, clock: Clock | None = None) -> None:
        self._config = config
        self.model_id = config.model_id
        self.aliases: Sequence[str] = config.aliases
        with translated(SimOptions, config.location / "engine_kwargs"):
            self.options = SimOptions.model_validate(config.engine_kwargs)
        self._scheduler = Scheduler(self.options, self._after_step, clock)
        self._app = App(self)
        self._task: asyncio.Task[None] | None = None
        self._death = ""
        self._died = asyncio.Event()
        self._requests = 0
        self._adapters: set[str] = set()
        self._ready = False
        self._paused = False
        self._asleep = False
        self._awake = frozenset[str]()
        self._weights = DEFAULT_WEIGHTS

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: EngineStartFailed when `start_error` is set or a callback of the user fails."""
        if self._task:
            return
        self._died.clear()
        await prepared(self._config, progress, fetch=False)
        progress("load")
        await asyncio.sleep(self.options.start_delay_s)
        if self.options.start_error:
            raise EngineStartFailed(self.options.start_error)
        self._task = asyncio.create_task(self._scheduler.run())
        progress("warm up")
        async with aclosing(self._scheduler.stream([([tokenizer.EOS], plan("ready", 1))])) as deltas:
            await anext(deltas)
        self._scheduler.batch.counts = Counts()
        self._ready = True

    async def stop(self) -> None:
        self._scheduler.fail("The engine was stopped.")
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
            self._ready = False

    def app(self) -> ASGIApp:
        return self._app

    async def generate(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Of a dict with `prompts`: `n` outputs of each in turn. `tokens_before` come again first."""
        adapter, obeyed = await self._admitted(adapter), wire.sampling(params)
        forms = tools.forms(obeyed.structured_outputs)
        asked: list[tuple[Sequence[int], PlannedReply]] = []
        for tokens in map(wire.read_prompt, wire.each(prompt)):
            said = self._answer(tokens, forms, adapter)
            room = min(obeyed.max_tokens or self.options.max_model_len, self._room(tokens.token_ids))
            stops = obeyed.stops(), bool(obeyed.ignore_eos), bool(obeyed.include_stop_str_in_output)
            asked += [(tokens.token_ids, plan(said, room, *stops))] * (obeyed.n or 1)
        limit, record = self.options.fail_after_tokens, record_tokens.get() or no_record
        before = [one for group in tokens_before.get() for one in group]
        record(())
        so_far: list[Sequence[ChoiceTokens]] = [(one,) for one in before]
        if record is no_record and (probe := tokens_so_far.get()) is not None:
            record = so_far.append
            probe.report(lambda tokens=0: so_far[tokens:])  # each group has one
        made, begun = 0, {one.choice for one in before}
        async with aclosing(self._scheduler.stream(asked, adapter, before)) as deltas:
            async for delta in deltas:
                if made == limit:
                    raise Error("The simulated engine failed, as its option fail_after_tokens told it to.")
                made += 1
                if made > len(before):
                    cached = () if delta.index in begun else (delta.cached_tokens,)
                    begun.add(delta.index)
                    record((ChoiceTokens(delta.token_ids, delta.index, delta.finish_reason, None, cached),))
                yield delta

    async def pool(self, prompts: Sequence[Sequence[int]], adapter: str | None) -> None:
        """Takes the time that embedding these token ids takes. Raises: PromptTooLong, EngineDead."""
        adapter = await self._admitted(adapter)
        for prompt in prompts:
            self._room(prompt)
        async with aclosing(self._scheduler.stream([(one, POOLED) for one in prompts], adapter)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "abort":
                    raise Unavailable("The request was aborted: the engine was paused or put to sleep.")

    async def _admitted(self, adapter: str | None) -> str | None:
        """The adapter of a new request, once it is known that the engine works."""
        await self.check_health()
        if (adapter := adapter or using_adapter.get()) is not None and adapter not in self._adapters:
            raise peft.not_loaded(adapter)
        self._requests += 1
        if self.options.error_every and self._requests % self.options.error_every == 0:
            raise Error("The simulated engine failed, as its option error_every told it to.")
        return adapter

    async def load_adapter(self, name: str, path: Path) -> None:
        """Accepts any folder with an `adapter_config.json`. One that comes while it sleeps is loaded with the
        others, by `wakeup`.
        """
        try:
            await asyncio.to_thread(peft.declared, path)
        except Broken as error:
            raise peft.refusal(name, str(error)) from error
        await asyncio.sleep(0 if self._asleep else self.options.adapter_load_s)
        self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.discard(name)

    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    async def check_health(self) -> None:
        if self._died.is_set():
            raise EngineDead(self._death)
        if not self._task:
            raise EngineDead("The engine is not running.")

    async def wait_dead(self) -> str:
        await self._died.wait()
        return self._death

    def load(self) -> Load:
        return self._scheduler.batch.load()

    @property
    def control(self) -> EngineControl:
        """The engine itself."""
        return self

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        if mode == "keep":
            raise BadRequest("Sleep empties the cache of requests that run; mode is 'wait' or 'abort'.")
        async with self._quiet(mode):
            self._scheduler.forget()
            self._asleep, self._awake = True, frozenset[str]()

    async def wakeup(self) -> None:
        await self.wakeup_parts(PARTS)

    async def wakeup_parts(self, parts: Collection[str]) -> None:
        if self._asleep:
            awake = self._awake | PARTS.intersection(parts)
            adapters = len(self._adapters) if awake == PARTS else 0
            await asyncio.sleep(self.options.wake_delay_s + adapters * self.options.adapter_load_s)
            self._awake |= awake
            self._asleep = self._awake != PARTS
            self._go_on()

    def is_sleeping(self) -> bool:
        return self._asleep

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        async with self._quiet(mode):
            self._paused = True
            if clear_cache:
                self._scheduler.forget()

    async def resume(self) -> None:
        self._paused = False
        self._go_on()

    def is_paused(self) -> bool:
        return self._paused

    @asynccontextmanager
    async def _quiet(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        """A pause that ends here, however it ends, unless the engine was asked to stay paused or asleep."""
        try:
            await self._scheduler.pause(mode)
            yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self._paused or self._asleep:
            self._scheduler.freeze()
        else:
            self._scheduler.resume()

    async def reset_prefix_cache(self) -> None:
        self._scheduler.forget()

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        """Accepts any folder: the simulator's output does not depend on weights."""
        if not await asyncio.to_thread(source.is_dir):
            raise BadRequest(f"There is no folder {source} with weights.")
        async with self._quiet("keep" if self._paused and mode == "wait" else mode):
            self._weights = version

    def weights_version(self) -> str:
        return self._weights

    def kv_tokens(self) -> int | None:
        return self.options.kv_blocks * self.options.block_size if self._task else None

    def max_model_len(self) -> int | None:
        return self.options.max_model_len if self._task else None

    def counts(self) -> Counts:
        """Totals since the start, for /metrics."""
        return self._scheduler.batch.counts

    def die(self, reason: str = "The simulated engine died.") -> None:
        """Dies like an engine whose process is killed. It stays dead until it is stopped and started."""
        if not self._died.is_set():
            self._death = reason
            self._died.set()
            self._scheduler.fail(reason)

    def _answer(self, tokens: wire.Tokens, forms: Sequence[str], adapter: str | None) -> str:
        """The reply of the options, or an echo. With `forms` the first of these, unless the reply is another
        of them, or an object as they are.
        """
        reply = self.options.replies.get(tokens.said) or self.options.reply or ""
        if forms:
            return reply if reply in forms or reply[:1] == forms[0][:1] == "{" else forms[0]
        return (f"[{adapter}] " if adapter else "") + (reply or tokens.said)

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens left for the response."""
        room = self.options.max_model_len - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {len(prompt)} tokens; this model's context window of "
                f"{self.options.max_model_len} must hold it and one token more. Shorten it.",
                param="prompt",
            )
        return room

    def _after_step(self) -> None:
        if not self._ready:
            return
        counts, options = self._scheduler.batch.counts, self.options
        if options.die_after_tokens and counts.made_tokens >= options.die_after_tokens:
            self.die("The simulated engine died, as its option die_after_tokens told it to.")
        if options.die_after_requests and counts.finished >= options.die_after_requests:
            self.die("The simulated engine died, as its option die_after_requests told it to.")
