"""VLLMEngine: the Engine protocol over AsyncLLM.

Start: the core's process first (`core.launch`), then, while that imports, vLLM's front-end here (`frontend`)
in a thread, so that the event loop keeps responding. The engine is ready when it has made one token.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.asgi import ASGIApp
from penstock.config.derive.placement import spans_nodes
from penstock.config.messages.problems import config_error
from penstock.engine import Delta, Load, Progress, Prompt, no_progress
from penstock.engine_control import EngineControl
from penstock.engines.edge import Edge
from penstock.engines.prepared import prepared
from penstock.engines.vllm import errors
from penstock.engines.vllm.arguments import environment
from penstock.engines.vllm.arguments.defaults import Shape, lora_faults, with_defaults
from penstock.engines.vllm.capabilities import version
from penstock.engines.vllm.capabilities.state import Capabilities, capabilities
from penstock.engines.vllm.core import failure_reason
from penstock.engines.vllm.core.imports import uncollected
from penstock.engines.vllm.core.launch import Core
from penstock.engines.vllm.core.other_nodes import OtherNodes
from penstock.engines.vllm.endpoints import absence, is_answered
from penstock.engines.watchdog import Watchdog
from penstock.errors import Conflict, EngineDead, EngineStartFailed, Error, Unsupported
from penstock.on_thread import completed
from penstock.request_context import Gang, gang, using_adapter
from penstock.temporary_folder import temporary_folder

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.outputs import RequestOutput

    from penstock.config import LLMConfig
    from penstock.engines.vllm.adapters import LoadedAdapters
    from penstock.engines.vllm.control import VLLMControl
    from penstock.engines.vllm.frontend.app import Plan
    from penstock.engines.vllm.frontend.gated_llm import GatedLLM
    from penstock.engines.vllm.frontend.load import LoadReader
    from penstock.engines.vllm.frontend.stats import SchedulerLogger
    from penstock.engines.vllm.rows.responder import RowResponder

log = logging.getLogger(__name__)

_FAREWELL_S = 1.0


class VLLMEngine:
    """One model in one vLLM engine, whose core and workers are processes of their own."""

    def __init__(self, config: LLMConfig) -> None:
        self._config = config
        self._folder: Path | None = None
        self._gang: Gang | None = None
        self._other_nodes: OtherNodes | None = None
        self._capabilities = Capabilities({})
        self._core: Core | None = None
        self._plan: Plan | None = None
        self._llm: GatedLLM | None = None
        self._control: EngineControl = _NotRunning()
        self._app: ASGIApp | None = None
        self._rows: RowResponder | None = None
        self._adapters: LoadedAdapters | None = None
        self._load_reader: LoadReader | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self._death = ""
        self._died = asyncio.Event()

    async def start(self, progress: Progress = no_progress) -> None:
        if self._llm is not None:
            return
        try:
            await self._start(progress)
        except BaseException as error:  # also when cancelled, for example by a time limit
            await self.stop()
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            raise _failed(self._config, failure_reason.describe(error)) from error

    async def _start(self, progress: Progress) -> None:
        self._refusal = None
        self._died.clear()
        self._other_nodes = OtherNodes() if spans_nodes(self._config) else None
        config = await prepared(self._config, progress)
        progress("import")
        version.check(version.installed())
        self._capabilities = fitting = await asyncio.to_thread(capabilities)
        fitting.report()
        shape = replace(Shape.of(config), media_rules=fitting.has("media_rules"))
        environment.prepare(shape)
        self._folder = temporary_folder("engine", sockets=True)
        self._gang = gang.get()
        _refuse_unfit(config, shape, self._gang, fitting)
        self._core = core = Core(self._folder, self._gang)
        self._plan = plan = await asyncio.to_thread(_plan, config, shape, self._gang)
        from penstock.engines.vllm.frontend.app import download, import_rest  # `_plan` has imported it

        if not _is_local(config):  # arguments that vLLM parses in its own way
            progress("download")
            await asyncio.to_thread(download, plan)
        progress("load")
        await asyncio.gather(self._load(core), asyncio.to_thread(import_rest, plan, fitting))
        with uncollected():
            app = await self._connect(core, plan, progress)
        await self._make_one_token(app)

    async def _load(self, core: Core) -> None:
        """Returns when the core has loaded the model. Raises: EngineStartFailed with its reason."""
        assert self._plan is not None
        order = core.order(self._plan.vllm_config, self._plan.executor_class, self._capabilities)
        try:
            await asyncio.to_thread(core.obey, order)
            await core.ready()
        except EngineDead:
            raise _failed(self._config, await asyncio.shield(core.ended)) from None

    async def _connect(self, core: Core, plan: Plan, progress: Progress) -> FastAPI:
        """Returns vLLM's application."""
        from penstock.engines.vllm.control import VLLMControl
        from penstock.engines.vllm.frontend import additions
        from penstock.engines.vllm.frontend.app import build_app, connect
        from penstock.engines.vllm.frontend.load import LoadReader

        fitting, scheduled = self._capabilities, None
        if fitting.has("scheduler_stats"):
            from penstock.engines.vllm.frontend.stats import SchedulerLogger

            scheduled = SchedulerLogger()
        self._llm = llm = connect(plan, fitting, scheduled, core)
        progress("warm up")
        app = await build_app(llm, plan, fitting)
        if fitting.has("adapter_versions"):
            from penstock.engines.vllm.adapters import LoadedAdapters

            names, models = (self._config.model_id, self._config.aliases), app.state.openai_serving_models
            self._adapters = LoadedAdapters(llm, lambda: self._control.is_sleeping(), *names, models)
        self._rows = await _responder(llm, app) if fitting.has("bulk_generation") else None
        absent = absence(self._config.model_id, app.routes)
        self._app = Edge(additions.shorten(fitting, app), lambda: self._refusal, absent, errors.heard)
        self._control = control = VLLMControl(
            llm, self._adapters, self._refuse_dead, self._end_core, self._begin_core
        )
        self._watch(core)
        self._load_reader = LoadReader(llm, scheduled)
        if scheduled is not None:
            self._guarding = asyncio.create_task(self._guard(llm, plan, scheduled, control))
        handler: asyncio.Task[None] | None = llm.output_handler
        assert handler is not None
        handler.add_done_callback(lambda _: self._on_front_failed())
        return app

    def _watch(self, core: Core) -> None:
        """The end of a core is the engine's death, unless `_end_core` has released it."""
        core.ended.add_done_callback(
            lambda ended: self._on_death(ended.result()) if core is self._core else None
        )

    async def _guard(
        self, llm: GatedLLM, plan: Plan, scheduled: SchedulerLogger, control: VLLMControl
    ) -> None:
        """Kills a core that is stuck: its requests would never be answered."""
        watchdog = Watchdog(
            lambda: self._core.pid if self._core is not None and llm.gate.is_set() else None,
            steps=lambda: scheduled.steps,
            working=lambda: bool(llm.get_num_unfinished_requests()),
            # one core's forward pass in a gang would wait for the others
            probe=partial(llm.collective_rpc, "check_health" if self._gang else "execute_dummy_batch"),
            resting=control.is_resting,
            workers_elsewhere=plan.executor_class.uses_ray,
        )
        reason = await watchdog.stalled()
        core = self._core
        self._on_death(reason)
        if core is not None:
            await asyncio.to_thread(core.kill)

    async def _end_core(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            try:
                await completed(core.stop())  # a half-stopped core answers no request
            finally:
                self._fail_calls(Conflict("The engine was put to sleep; wake it up before."))

    async def _begin_core(self) -> None:
        """Starts a replacement core behind the same front-end. Raises: EngineStartFailed."""
        assert self._folder is not None
        self._core = core = Core(self._folder, self._gang)
        try:
            await self._load(core)
        except BaseException:
            await self._end_core()
            raise
        self._watch(core)

    async def _make_one_token(self, app: FastAPI) -> None:
        """Has a request answered. Raises: RuntimeError if it fails."""
        assert self._llm is not None
        paths = {getattr(route, "path", "") for route in app.routes}
        if await is_answered(self.app(), self._config.model_id, paths):
            return
        if "generate" in await self._llm.get_supported_tasks():
            async with aclosing(self.generate([0], {"max_tokens": 1})) as deltas:
                await anext(deltas)

    async def stop(self) -> None:
        if self._llm is not None:
            self._refuse("The engine was stopped.")
        llm, self._llm = self._llm, None
        core, self._core = self._core, None
        if self._guarding is not None:
            self._guarding.cancel()
        async with AsyncExitStack() as ending:  # to its end where the caller gives up, too
            if self._folder is not None:
                ending.callback(shutil.rmtree, self._folder, ignore_errors=True)
                self._folder = None
            if self._other_nodes is not None:
                ending.callback(self._other_nodes.close)
            if core is not None:
                ending.push_async_callback(core.stop)
            if llm is not None:
                ending.callback(llm.shutdown)
                await self._end_streams(llm, core)

    def app(self) -> ASGIApp:
        if self._app is None:
            raise RuntimeError("An engine has no application before its start.")
        return self._app

    async def respond(self, path: str, body: bytes, *, request_id: str | None = None) -> bytes | None:
        await self.check_health()
        if self._rows is None:
            return None
        try:
            return await self._rows.respond(path, body, request_id)
        except Exception as error:
            raise self._named(error) from error

    async def generate(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        await self.check_health()
        from penstock.engines.vllm.deltas import deltas

        adapter = adapter or using_adapter.get()
        try:
            async with aclosing(await self._outputs(prompt, params, request_id, adapter)) as outputs:
                async for output in outputs:
                    for delta in deltas(output):
                        yield delta
        except Exception as error:
            raise self._named(error) from error

    async def _outputs(
        self, prompt: Prompt, params: Mapping[str, Any], request_id: str | None, adapter: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's stream for a prompt that it has checked and tokenized."""
        from penstock.engines.vllm.deltas import sampling
        from penstock.engines.vllm.frontend import prepared_prompts

        assert self._llm is not None
        obeyed = sampling(params)
        lora = self._loaded_adapters().request(adapter) if adapter else None
        rendered: Any = prompt if isinstance(prompt, str | Mapping) else {"prompt_token_ids": prompt}
        prepared_prompts.check(prompt)
        if self._capabilities.has("prepared_prompts"):
            prompt_input = prepared_prompts.parsed(self._llm.model_config, prompt)
            (rendered,) = await self._llm.renderer.render_cmpl_async([prompt_input])
        return self._llm.generate(rendered, obeyed, request_id or uuid.uuid4().hex, lora_request=lora)

    async def load_adapter(self, name: str, path: Path) -> None:
        await self.check_health()
        await self._loaded_adapters().load(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.check_health()
        await self._loaded_adapters().unload(name)

    def _loaded_adapters(self) -> LoadedAdapters:
        if self._adapters is None:
            raise Unsupported(
                "This engine cannot load adapters: vLLM's capability adapter_versions is off "
                f"({self._capabilities.off.get('adapter_versions')})."
            )
        return self._adapters

    def adapters(self) -> frozenset[str]:
        return self._adapters.names() if self._adapters else frozenset()

    async def check_health(self) -> None:
        self._refuse_dead()

    async def wait_dead(self) -> str:
        await self._died.wait()
        return self._death

    def load(self) -> Load:
        return self._load_reader.read() if self._llm is not None and self._load_reader is not None else Load()

    def kv_tokens(self) -> int | None:
        if self._llm is None:
            return None
        cache = self._llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size or None

    def max_model_len(self) -> int | None:
        return self._llm.model_config.max_model_len if self._llm is not None else None

    @property
    def control(self) -> EngineControl:
        return self._control

    def _refuse_dead(self) -> None:
        if self._refusal is not None or self._llm is None:
            raise EngineDead(self._refusal or "The engine is not running.")

    def _named(self, error: Exception) -> Error:
        return EngineDead(self._refusal) if self._refusal is not None else errors.from_exception(error)

    def _on_front_failed(self) -> None:
        reason = self._core.reason() if self._core is not None else None
        self._on_death(reason or "its core failed, see the log")

    def _on_death(self, why: str) -> None:
        """The core has ended, or is about to: the engine's death, unless we stopped it."""
        if self._refusal is not None:
            return
        self._refuse("The engine behind this replica is gone.")
        self._death = why
        self._died.set()
        if self._core is not None:
            asyncio.get_running_loop().run_in_executor(None, self._core.announce_death)

    def _refuse(self, sentence: str) -> None:
        self._refusal = self._refusal or sentence
        self._fail_calls(EngineDead(self._refusal))
        if self._llm is not None:
            self._llm.gate.set()  # requests that wait there hear of it

    def _fail_calls(self, error: Error) -> None:
        """Ends the core's calls under way: vLLM's front-end would wait for them for ever."""
        for call in self._llm.engine_core.utility_results.values() if self._llm is not None else ():
            if not call.done():
                call.set_exception(error)

    async def _end_streams(self, llm: GatedLLM, core: Core | None) -> None:
        """Ends open streams, which would wait for ever if vLLM's front-end shut down first."""
        handler = llm.output_handler
        if core is None or handler is None or not llm.get_num_unfinished_requests():
            return
        await asyncio.to_thread(core.announce_death)
        await asyncio.wait({handler}, timeout=_FAREWELL_S)


class _NotRunning(EngineControl):
    """Stands in for the parts of an engine that was not started."""

    def _lacks(self, operation: str) -> NoReturn:
        raise EngineDead("The engine is not running.")


def _plan(config: LLMConfig, shape: Shape, gang: Gang | None) -> Plan:
    """Imports vLLM, which takes seconds, and has it check the arguments."""
    with uncollected():
        version.check_installed()
        from penstock.engines.vllm.arguments import schema
        from penstock.engines.vllm.frontend.app import plan

    if found := lora_faults(config):
        raise config_error(found)
    engine, frontend = schema.split(with_defaults(config.engine_kwargs, shape), config.location)
    tokenizer = config.model_loading_config.tokenizer_source
    engine = {
        **engine,
        **({"tokenizer": tokenizer} if tokenizer else {}),
        "model": config.model_source,
        "served_model_name": [config.model_id, *config.aliases],
        **({"data_parallel_rank": gang.rank, "data_parallel_address": gang.host} if gang else {}),
    }
    return plan(engine, frontend)


async def _responder(llm: GatedLLM, app: FastAPI) -> RowResponder | None:
    """None, too, where it cannot be made: the engine answers everything without it."""
    from penstock.engines.vllm.rows.responder import row_responder

    try:
        return await row_responder(llm, app)
    except Exception:  # whatever vLLM raises for a sample
        log.warning("Rows of batches take the long way through vLLM's application.", exc_info=True)
        return None


def _is_local(config: LLMConfig) -> bool:
    return Path(config.model_source).exists()


def _refuse_unfit(config: LLMConfig, shape: Shape, gang: Gang | None, fitting: Capabilities) -> None:
    """Raises: EngineStartFailed for a model that would not run right without what is off."""
    splits = shape.cpu and (gang or config.engine_kwargs.get("pipeline_parallel_size", 1) > 1)
    for name, needed in (("data_parallel", gang), ("cpu_workers", splits)):
        if needed and not fitting.has(name):
            raise _failed(config, f"vLLM's capability {name} is off ({fitting.off[name]})")


def _failed(config: LLMConfig, why: str) -> EngineStartFailed:
    return EngineStartFailed(f"Model '{config.model_id}' cannot start: {why.rstrip('.')}.")
