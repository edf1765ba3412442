"""Read at each start of Python in `.venv-sglang`, so that SGLang runs on a CPU and starts in half the time.

It imports the models that tests use and no others: of its two hundred, those for GPUs fail. Its adapters'
layers get a torch that does not pin memory, which only a GPU's driver can.
"""

import importlib.util
import os
import sys
from pathlib import Path

_MODELS = {"qwen2", "registry", "utils"}
_PINNING = {"sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"}


def _other_models() -> str:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return ""
    models = Path(found.submodule_search_locations[0], "srt", "models")
    return ",".join(sorted(file.stem for file in models.glob("*.py") if file.stem not in _MODELS))


class _Unpinned:
    """torch, which leaves memory as it is."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        found = getattr(self._torch, name)
        if name not in ("empty", "tensor", "zeros"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


class _Unpin:
    """Asked about every import; acts on those."""

    def __init__(self):
        self._left = set(_PINNING)

    def find_spec(self, name, path=None, target=None):
        if name not in self._left:
            return None
        self._left.remove(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_unpinned(module):
            run(module)
            module.torch.Tensor.pin_memory = lambda tensor: tensor
            module.torch = _Unpinned(module.torch)

        spec.loader.exec_module = run_unpinned
        return spec


os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", _other_models())
sys.meta_path.insert(0, _Unpin())
