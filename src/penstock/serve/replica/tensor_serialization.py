"""How tensors and pictures go from a preprocessor's process to a replica: as buffers in Ray's shared memory.

Ray does that by itself with numpy's arrays. Tensors and pictures it would write into the pickle, which takes
ten times and nearly twice as long for 50 MB (docs/benchmarks.md). Here they are copied once more when they
are received, so that whoever gets them may write to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from ray.util import register_serializer

_known: set[str] = set()


def ready() -> None:
    """Call it before something is sent. What no library has been loaded for is in no parcel."""
    for module, (kind, pack, unpack) in _KINDS.items():
        if module in sys.modules and module not in _known:
            register_serializer(getattr(sys.modules[module], kind), serializer=pack, deserializer=unpack)
            _known.add(module)


def _pack_tensor(tensor: Any) -> tuple[Any, ...]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        raise TypeError(f"A tensor of {tensor.dtype}, {tensor.layout}, cannot be sent to a replica.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    its_bytes: Any = flat.view(torch.uint8).numpy()
    return tensor.dtype, tuple(tensor.shape), PickleBuffer(its_bytes)


def _unpack_tensor(packed: tuple[Any, ...]) -> Any:
    import torch

    dtype, shape, buffer = packed
    made = torch.empty(shape, dtype=dtype)
    if made.numel():
        its_bytes: Any = made.reshape(-1).view(torch.uint8).numpy()
        memoryview(its_bytes)[:] = memoryview(buffer).cast("B")
    return made


def _pack_picture(picture: Any) -> tuple[Any, ...]:
    if picture.mode == "P":  # its colours are elsewhere
        picture = picture.convert("RGBA" if "transparency" in picture.info else "RGB")
    return picture.mode, picture.size, picture.info, PickleBuffer(picture.tobytes())


def _unpack_picture(packed: tuple[Any, ...]) -> Any:
    from PIL import Image

    mode, size, info, buffer = packed
    made = Image.frombytes(mode, size, memoryview(buffer))
    made.info = info
    return made


_KINDS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch": ("Tensor", _pack_tensor, _unpack_tensor),
    "PIL.Image": ("Image", _pack_picture, _unpack_picture),
}
