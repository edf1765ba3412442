"""Imports vLLM without garbage collection, which would scan modules repeatedly and find nothing."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Generator
from contextlib import contextmanager

# The last collection spares frozen objects, and nanobind, which binds Triton, then lists them as leaked.
atexit.register(gc.unfreeze)


@contextmanager
def uncollected() -> Generator[None]:
    """No collection inside; objects created inside are exempt from later ones. Importing vLLM takes 3.7 s
    instead of 5.3.

    vLLM's core collects explicitly a dozen times while it starts and stops: with its imports, 0.2 s each.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
