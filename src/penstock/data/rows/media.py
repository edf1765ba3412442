"""Images, videos and audio of a row's messages as data URLs, which every engine takes.

Made where rows are prepared, away from the engine. Web URLs stay: the engine fetches them, by its own rules
about hosts. The engine decodes images; bytes of no known format are refused here.
"""

from __future__ import annotations

import base64
import io
import sys
import wave
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, cast

from penstock.data.rows.coerce import invalid_field, truncate, type_name
from penstock.data.storage.paths import storage_path
from penstock.errors import BadRequest, DownloadFailed, SourceNotFound, Unavailable

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftyphei", "image/heic"),
    (4, b"ftypM4A", "audio/mp4"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
    (8, b"AVI ", "video/x-msvideo"),
    (0, b"FLV", "video/x-flv"),
    (0, b"\0\0\1\xba", "video/mpeg"),
    (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"\xff\xf3", "audio/mpeg"),
    (0, b"\xff\xf2", "audio/mpeg"),
)
_KNOWN = {
    "image": "PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC",
    "video": "MP4, WebM, AVI, FLV or MPEG",
    "audio": "WAV, FLAC, OGG, MP3 or M4A",
}
_AUDIO_OR_VIDEO = {"video/mp4", "video/webm", "audio/ogg"}
"""Containers of audio as well as video."""

_PASSED_ON = ("http://", "https://", "data:")
_JPEG_QUALITY = 95


def data_url(value: Any, kind: str, where: str, read_files: bool = True) -> str:
    """The URL of bytes, a PIL image, an array, a path, a URL, or a dict as in Hugging Face datasets.

    kind: image, video, audio.
    Raises: BadRequest naming `where`; DownloadFailed when a bucket or server fails.
    """
    if hasattr(value, "as_py"):
        value = value.as_py()
    if isinstance(value, Mapping):
        return _of_dataset(cast("Mapping[str, Any]", value), kind, where, read_files)
    if isinstance(value, str | PurePath):
        return _of_text(str(value), kind, where, read_files)
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_url(bytes(value), kind, where)
    if kind == "image" and (found := _as_png(value, where)):
        return _data_url(found, kind, where)
    if kind == "video" and isinstance(value, list | tuple):
        return _frames(cast("list[Any]", value), where)
    raise invalid_field(where, f"is {type_name(value)}; {_ways(kind)}")


def input_audio(value: Any, where: str, read_files: bool) -> tuple[str, str]:
    """Base64 and format (`wav`, `mp3`, ...) for an `input_audio` part from bytes, a file or an array."""
    address = data_url(value, "audio", where, read_files)
    if not address.startswith("data:"):
        raise invalid_field(where, "is a web URL, but input_audio needs data; use a part of type audio_url")
    head, _, data = address.partition(",")
    kind = head.removeprefix("data:").partition(";")[0].partition("/")[2]
    return data, {"mpeg": "mp3", "x-wav": "wav"}.get(kind, kind)


def _of_text(text: str, kind: str, where: str, read_files: bool) -> str:
    if text.startswith(_PASSED_ON):
        return text
    if not read_files:
        raise invalid_field(
            where,
            f"is {truncate(repr(text))}; files are not read here, only data: and http(s): URLs are sent",
        )
    if not text:
        raise invalid_field(where, f"is an empty string; {_ways(kind)}")
    try:
        if "::" in text:  # fsspec's way to name a URL within another
            raise FileNotFoundError(text)
        return _data_url(storage_path(text).read(), kind, where)  # RuntimeError: "~" before an unknown user
    except (SourceNotFound, OSError, ValueError, RuntimeError) as error:
        raise invalid_field(
            where, f"is {truncate(repr(text))}: there is no such file; {_ways(kind)}"
        ) from error
    except Unavailable as error:
        if error.facts.get("retryable"):
            raise DownloadFailed(str(error), retryable=True) from error
        raise BadRequest(f"{where}: {error}", param=where) from error


def _of_dataset(value: Mapping[str, Any], kind: str, where: str, read_files: bool) -> str:
    """From {"bytes", "path"}, or {"array", "sampling_rate"} of decoded audio."""
    if value.get("array") is not None and kind == "audio":
        return _data_url(_wave(value["array"], value.get("sampling_rate"), where), kind, where)
    found = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None)
    if found is None:
        raise invalid_field(where, f"is a dict with the keys {', '.join(map(repr, value))}; {_ways(kind)}")
    return data_url(found, kind, where, read_files)


def _data_url(content: bytes, kind: str, where: str) -> str:
    mime = next((mime for at, start, mime in _SIGNATURES if content.startswith(start, at)), None)
    if mime is None or not (mime.startswith(kind) or (kind != "image" and mime in _AUDIO_OR_VIDEO)):
        what = (
            f"{mime}" if mime else f"bytes that begin with {content[:8]!r}" if content else "no bytes at all"
        )
        raise invalid_field(where, f"has {what}, which is not a known {kind} format; use {_KNOWN[kind]}")
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def _as_png(value: Any, where: str) -> bytes | None:
    """A PIL image, or an array as Ray Data reads images, as PNG (lossless); None for other values."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        value = _from_array(value, where)
    pil: Any = sys.modules.get("PIL.Image")  # a caller that has an image has imported it
    if pil is None or not isinstance(value, pil.Image):
        return None
    if not (value.width and value.height):
        raise invalid_field(where, f"is an image of {value.width} x {value.height} pixels")
    try:
        value.load()
    except Exception as error:  # of many kinds, as its file is cut or damaged
        raise invalid_field(where, f"is an image that cannot be read ({error})") from error
    try:
        return _saved(value, "PNG", compress_level=1)
    except OSError:  # a mode that PNG lacks: CMYK, LAB, F
        return _saved(value.convert("RGB"), "PNG", compress_level=1)


def _saved(picture: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def _from_array(value: Any, where: str) -> Any:
    from PIL import Image  # only arrays need it

    if str(value.dtype).removeprefix("torch.") != "uint8":
        raise invalid_field(
            where, f"is an array of {value.dtype}; an image must be of uint8, (height, width, 3)"
        )
    try:
        return Image.fromarray(value if hasattr(value, "__array_interface__") else value.numpy())
    except (TypeError, ValueError) as error:
        shape = tuple(value.shape)
        raise invalid_field(
            where, f"is an array of shape {shape}; an image has (height, width, 3)"
        ) from error


def _frames(frames: list[Any], where: str) -> str:
    """vLLM's form for a video of single frames: JPEGs, one after another."""
    shots: list[str] = []
    for index, frame in enumerate(frames):
        if (picture := _as_png(frame, f"{where}[{index}]")) is None:
            raise invalid_field(
                f"{where}[{index}]", f"is {type_name(frame)}; a video's frames must be images"
            )
        from PIL import Image

        shot = Image.open(io.BytesIO(picture)).convert("RGB")
        shots.append(base64.b64encode(_saved(shot, "JPEG", quality=_JPEG_QUALITY)).decode())
    if not shots:
        raise invalid_field(where, f"is an empty list; {_ways('video')}")
    return f"data:video/jpeg;base64,{','.join(shots)}"


def _wave(array: Any, rate: Any, where: str) -> bytes:
    """16-bit WAV of samples between -1 and 1; shape (samples,) or (channels, samples)."""
    import numpy as np

    samples = np.asarray(array)
    if rate is None or samples.ndim not in (1, 2) or not len(samples):
        raise invalid_field(where, "has an 'array' without 'sampling_rate', or one of a wrong shape")
    if samples.dtype.kind == "f":
        samples = (np.clip(samples, -1, 1) * 32767).round()
    samples = samples if samples.ndim == 1 else samples.T
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(int(rate))
        writer.writeframes(np.ascontiguousarray(samples, dtype="<i2").tobytes())
    return file.getvalue()


def _ways(kind: str) -> str:
    own = {"image": "a PIL image, ", "video": "a list of images, ", "audio": ""}[kind]
    return f"give bytes, {own}a path, or a URL (data:, http(s):, file://, s3://, gs://)"
