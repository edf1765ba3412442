"""Ray serializers for tensors and images from a preprocessor's process: as buffers in Ray's shared memory.

Ray does that for numpy arrays only. It would write tensors and images into the pickle, which takes ten times
and nearly twice as long for 50 MB (benchmarks/log.md). The receiver copies them, so that they are writable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from ray.util import register_serializer

_registered: set[str] = set()


def register() -> None:
    """Call it before sending. Objects of libraries that are not imported cannot occur."""
    for module, (kind, pack, unpack) in _SERIALIZERS.items():
        if module in sys.modules and module not in _registered:
            register_serializer(getattr(sys.modules[module], kind), serializer=pack, deserializer=unpack)
            _registered.add(module)


def _pack_tensor(tensor: Any) -> tuple[Any, ...]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        raise TypeError(f"A tensor of {tensor.dtype}, {tensor.layout}, cannot be sent to a replica.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    as_bytes: Any = flat.view(torch.uint8).numpy()
    return tensor.dtype, tuple(tensor.shape), PickleBuffer(as_bytes)


def _unpack_tensor(packed: tuple[Any, ...]) -> Any:
    import torch

    dtype, shape, buffer = packed
    made = torch.empty(shape, dtype=dtype)
    if made.numel():
        as_bytes: Any = made.reshape(-1).view(torch.uint8).numpy()
        memoryview(as_bytes)[:] = memoryview(buffer).cast("B")
    return made


def _pack_image(image: Any) -> tuple[Any, ...]:
    if image.mode == "P":  # its pixels index a palette
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.mode, image.size, image.info, PickleBuffer(image.tobytes())


def _unpack_image(packed: tuple[Any, ...]) -> Any:
    from PIL import Image

    mode, size, info, buffer = packed
    made = Image.frombytes(mode, size, memoryview(buffer))
    made.info = info
    return made


_SERIALIZERS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch": ("Tensor", _pack_tensor, _unpack_tensor),
    "PIL.Image": ("Image", _pack_image, _unpack_image),
}
