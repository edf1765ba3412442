"""Requests with pictures and videos, for tests of a model that sees, and what it said."""

from __future__ import annotations

import io
from typing import Any

import pytest
from enginetest import MODEL_ID, Served
from PIL import Image
from tests.pictures import data_url

from recipes.vision.pictures import draw

RED_CIRCLE, BLUE_SQUARE = draw("red", "circle"), draw("blue", "square")
TOKEN = 28
"""Pixels, each way, of what becomes one token."""


def clip(picture: Image.Image, frames: int = 16) -> bytes:
    """An mp4 of two seconds that shows nothing else."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        stream = made.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *picture.size, "yuv420p", 2_000_000
        for _ in range(frames):
            made.mux(stream.encode(av.VideoFrame.from_image(picture)))
        made.mux(stream.encode())
    return file.getvalue()


def shown(picture: Image.Image | str) -> dict[str, Any]:
    """A part of a message."""
    url = picture if isinstance(picture, str) else data_url(picture)
    return {"type": "image_url", "image_url": {"url": url}}


def filmed(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def asked(*parts: dict[str, Any] | str, **options: Any) -> dict[str, Any]:
    """A chat request of one message."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    greedy = {"temperature": 0, "max_tokens": 40}
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], **greedy, **options}


async def answer(vision: Served, *parts: dict[str, Any] | str, **options: Any) -> dict[str, Any]:
    response = await vision.http.post("/v1/chat/completions", json=asked(*parts, **options))
    assert response.status_code == 200, response.text
    return response.json()


async def said(vision: Served, *parts: dict[str, Any] | str, **options: Any) -> str:
    return (await answer(vision, *parts, **options))["choices"][0]["message"]["content"]


async def refused(vision: Served, *parts: dict[str, Any] | str, **options: Any) -> str:
    response = await vision.http.post("/v1/chat/completions", json=asked(*parts, **options))
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]
