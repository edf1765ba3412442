"""Where a request carries the tokens that its answer begins with, from the front-end to core and workers."""

from __future__ import annotations

from typing import Any

EMITTED = "penstock_emitted"
"""The ids, among the `extra_args` of sampling parameters: they reach the workers in every version."""


def emitted(params: Any) -> list[int]:
    """Of a request's sampling parameters, if it has some."""
    return ((params and params.extra_args) or {}).get(EMITTED, [])
