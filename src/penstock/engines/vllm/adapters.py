"""Adapters in vLLM: those loaded in its core, and the registry in which its app looks them up.

The registry also says by which name a response is given: an adapter's, or the one of the model's names that
the request has. Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import VLLMNotFoundError
from vllm.lora.request import LoRARequest

from penstock.engine import plain_name
from penstock.engines import peft, weights
from penstock.engines.vllm import errors
from penstock.engines.vllm.frontend.gated_llm import GatedLLM
from penstock.errors import AdapterBroken, Unsupported
from penstock.request_context import using_adapter

log = logging.getLogger(__name__)

_asked_name: ContextVar[str | None] = ContextVar("asked_name", default=None)
"""Which of the model's own names the running request has; None when it has none."""

_LOOK_S = 0.05  # waits for the last request of an adapter


class Register(dict[str, LoRARequest]):
    """vLLM's map from a request's `model` to its adapter; an adapter set for the request takes precedence."""

    def __init__(self, model_id: str, aliases: Collection[str], others: dict[str, LoRARequest]) -> None:
        """aliases: may grow later. others: adapters that vLLM itself loaded at its start, by the argument
        `lora_modules`.
        """
        super().__init__(others)
        self._model_id = model_id
        self._aliases = aliases
        self._others = frozenset(others)

    def key(self, adapter: str) -> str:
        return f"{self._model_id}:{adapter}"

    def __contains__(self, model: object) -> bool:
        return using_adapter.get() is not None or super().__contains__(model)

    def __getitem__(self, model: str) -> LoRARequest:
        using = using_adapter.get()
        try:
            return super().__getitem__(model if using is None else self.key(using))
        except KeyError:
            raise VLLMNotFoundError(str(peft.not_loaded(using or model))) from None

    def is_base_model(self, model_name: str) -> bool:
        """vLLM checks a request's `model` by it, before it asks for `answer_name`."""
        known = model_name == self._model_id or model_name in self._aliases
        _asked_name.set(model_name if known else None)
        return known

    def answer_name(self, lora_request: LoRARequest | None = None) -> str:
        """The model name to show in a response."""
        if lora_request is None:
            return _asked_name.get() or self._model_id
        name = lora_request.lora_name
        return name if name in self._others else plain_name(name)


class LoadedAdapters:
    """The loaded adapters of one engine. An adapter is in the core before a request that names it is."""

    def __init__(
        self,
        llm: GatedLLM,
        asleep: Callable[[], bool],
        model_id: str,
        aliases: Collection[str],
        models: OpenAIServingModels,
    ) -> None:
        """asleep: whether the core takes no calls. What is loaded meanwhile comes to it by `restore`."""
        self._llm = llm
        self._asleep = asleep
        self._config = llm.vllm_config.lora_config
        self._register = Register(model_id, aliases, models.lora_requests)
        self._next_id = models.lora_id_counter
        self._loaded: dict[str, LoRARequest] = {}
        models.lora_requests = self._register
        models.model_name = self._register.answer_name
        models.is_base_model = self._register.is_base_model

    def names(self) -> frozenset[str]:
        return frozenset(self._loaded)

    def request(self, name: str | None) -> LoRARequest | None:
        """The LoRA request for vLLM's calls. Raises: ModelNotFound when it is not loaded."""
        if name is None:
            return None
        if name not in self._loaded:
            raise peft.not_loaded(name)
        return self._loaded[name]

    async def load(self, name: str, path: Path) -> None:
        if self._config is None:
            raise Unsupported(peft.NO_ROOM)
        if name in self._loaded:
            return
        max_rank: int = self._config.max_lora_rank
        try:
            await asyncio.to_thread(lambda: peft.check(path, max_rank, self._base))
        except weights.Broken as error:
            raise peft.refusal(name, str(error)) from error
        async with self._llm.sleep_lock:
            if name not in self._loaded:
                request = LoRARequest(self._register.key(name), self._next_id.inc(1), str(path))
                if not self._asleep():
                    await self._add(name, request)
                self._loaded[name] = self._register[request.lora_name] = request

    async def unload(self, name: str) -> None:
        request = self._forget(name)
        if request is not None:
            while self._runs(request):  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(_LOOK_S)
            async with self._llm.sleep_lock:
                if not self._asleep():
                    await self._llm.remove_lora(request.lora_int_id)

    async def restore(self) -> None:
        """Loads all registered adapters into a core that has lost them, or was asleep when they came.

        Forgets one that vLLM refuses: the others shall be served.
        """
        for name, request in tuple(self._loaded.items()):
            try:
                await self._add(name, request)
            except AdapterBroken as error:
                log.error("%s", error)
                self._forget(name)

    def _forget(self, name: str) -> LoRARequest | None:
        request = self._loaded.pop(name, None)
        if request is not None:
            self._register.pop(request.lora_name, None)
        return request

    def _runs(self, adapter: LoRARequest) -> bool:
        """Whether a request uses it; a background response goes on after its HTTP response has ended.

        The core would read the adapter's files again, and die where they are gone.
        """
        states = self._llm.output_processor.request_states.values()
        return any(state.lora_name == adapter.lora_name for state in states)

    @functools.cached_property
    def _base(self) -> dict[str, tuple[int, ...]]:
        """The base model's tensors, if its files are local and readable. Blocks.

        Not for a quantized model, which packs them in its own way.
        """
        if self._llm.model_config.quantization is not None:
            return {}
        try:
            return weights.shapes_in(Path(self._llm.model_config.model))
        except weights.Broken:
            log.warning("The model's files cannot be read: adapters are not compared with it.")
            return {}

    async def _add(self, name: str, request: LoRARequest) -> None:
        """vLLM loads it in its core; whatever a failed load left there is removed."""
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            errors.reraise_unless_refused(error)
            log.exception("vLLM refused the adapter %s", request.lora_name)
            await self._llm.remove_lora(request.lora_int_id)
            raise peft.refusal(name, f"vLLM says: {_said(error, request)}") from error


def _said(error: Any, request: LoRARequest) -> str:
    """The core's message, without the failed call and the folder, which clients need not know."""
    text = (
        str(error).strip().removeprefix("Call to add_lora method failed: ").replace(request.lora_path, "it")
    )
    return text.splitlines()[0][:500] if text else type(error).__name__
