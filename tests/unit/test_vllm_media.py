"""Pictures of data URLs: base64 in every common form is read; a request has pixels for a few large ones."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

from penstock.engines.vllm.media.connector import PICTURES, Media
from penstock.request_context import Pixels, pixels

SIDE = 100


def png(side: int = SIDE) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((side, side), 90).save(file, "PNG")
    return file.getvalue()


def url(encoded: bytes) -> str:
    return f"data:image/png;base64,{encoded.decode()}"


async def load(given: str) -> Any:
    return await Media().load_from_url_async(given, ImageMediaIO())


@pytest.fixture
def at_most_one_picture_of_that_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(SIDE * SIDE))
    token = pixels.set(Pixels())
    yield
    pixels.reset(token)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes, base64.urlsafe_b64encode])
async def test_base64_may_be_wrapped_and_have_the_letters_for_urls(encode: Any):
    assert (await load(url(encode(png())))).media.size == (SIDE, SIDE)
    assert Media().load_from_url(url(encode(png())), ImageMediaIO()).media.size == (SIDE, SIDE)


@pytest.mark.usefixtures("at_most_one_picture_of_that_size")
async def test_a_request_has_pixels_for_a_few_pictures_of_the_largest_size():
    given = [url(base64.b64encode(png(SIDE - number))) for number in range(PICTURES + 1)]
    await asyncio.gather(*map(load, given[1:]))
    with pytest.raises(VLLMValidationError, match="more than 40,000 pixels together"):
        await load(given[0])
    pixels.set(Pixels())
    with pytest.raises(VLLMValidationError, match="maximum of 10000 pixels"):
        await load(url(base64.b64encode(png(SIDE + 1))))


@pytest.mark.usefixtures("at_most_one_picture_of_that_size")
async def test_the_frames_of_a_video_count_as_pictures():
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE)).save(file, "JPEG")
    frames = ",".join([base64.b64encode(file.getvalue()).decode()] * (PICTURES + 1))
    video = VideoMediaIO(ImageMediaIO(), num_frames=-1)
    with pytest.raises(VLLMValidationError, match="pixels together"):
        await Media().load_from_url_async(f"data:video/jpeg;base64,{frames}", video)
