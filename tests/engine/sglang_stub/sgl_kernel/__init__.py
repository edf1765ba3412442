"""Stands in for SGLang's compiled GPU kernels, so that its plain torch code runs on a CPU. For tests only.

SGLang imports names from here at load time and, on a CPU without these kernels, calls none of them. Every
attribute and submodule is a `Placeholder`; calling one is an error that names it. It is no supported set-up:
on a machine with a GPU, SGLang is installed the ordinary way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.10"


class Placeholder:
    """What a kernel's name stands for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self._name, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._name} is a GPU kernel; this is a stub of it for tests.")


class _Module(ModuleType):
    """A submodule of which everything is a placeholder."""

    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self.__name__, name)


class _Submodules:
    """Finds and makes every `sgl_kernel.*`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _placeholder(module: str, name: str) -> Placeholder:
    if name.startswith("__"):
        raise AttributeError(name)
    return Placeholder(f"{module}.{name}")


def __getattr__(name: str) -> Placeholder:
    return _placeholder(__name__, name)


sys.meta_path.append(_Submodules())  # type: ignore[arg-type]
