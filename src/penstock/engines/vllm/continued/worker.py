"""Requests that begin with tokens which another engine has made, in vLLM's first model runner.

The runner keeps a state for each request. There such tokens are output, and the request's generator has drawn
once for each. Importing this file imports vLLM.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from penstock.engines.vllm.continued.emitted import emitted

_PHILOX = 4  # how far one draw moves the offset of CUDA's generators, as the runner assumes, too

_own = CachedRequestState.__post_init__


def take_up(worker: Any) -> None:
    """Changes how this process makes such states. Idempotent."""
    kind: Any = CachedRequestState
    kind.__post_init__ = _begin


def _begin(state: CachedRequestState) -> None:
    state.output_token_ids = list(emitted(state.sampling_params))
    if state.generator is not None and state.generator.device.type == "cpu":
        seed, state.generator = state.generator.initial_seed(), Draws()
        state.generator.begin(state, seed)
    elif state.generator is not None and state.output_token_ids:
        state.generator.set_offset(_PHILOX * len(state.output_token_ids))
    _own(state)


class Draws(torch.Generator):
    """A seeded request's generator on a CPU, after one draw for each token of its output.

    For each part of a prompt but the last, the runner sets the offset back by a draw. vLLM's own generators
    on a CPU have no offset: such a request ended the engine (vLLM 0.32).
    """

    def begin(self, state: CachedRequestState, seed: int) -> None:
        self._state = weakref.proxy(state)
        self.manual_seed(seed)
        self.set_offset(0)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> Any:
        self.manual_seed(self.initial_seed())
        for _ in self._state.output_token_ids:
            torch.randint(0, 1 << 31, (1,), generator=self, dtype=torch.long)  # as vLLM's sampler does
