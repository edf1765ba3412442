"""Your own preprocessing before a vision model, as on Qwen's model cards: what it returns reaches `generate`.

    VISION_MODEL=Qwen/Qwen2-VL-2B-Instruct python examples/vision_preprocessing.py

Chat, completions, Responses and Messages go through it, with streaming, tools and usage as ever.
"""

import base64
import io
import os
from typing import Any

import av
from PIL import Image
from qwen_vl_utils import process_vision_info
from ray import serve
from transformers import AutoProcessor

from penstock.serve import LLMConfig, build_openai_app

FRAMES_PER_SECOND = 2


class VisionInfo:
    def __init__(self, llm_config: LLMConfig, max_pixels: int = 1_003_520) -> None:
        self.processor = AutoProcessor.from_pretrained(llm_config.model_loading_config.model_source)
        self.max_pixels = max_pixels

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        messages, tools = messages_of(request, self.max_pixels), tools_of(request)
        prompt = self.processor.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        images, videos, video_kwargs = process_vision_info(messages, return_video_kwargs=True)
        media = {"image": images, "video": videos}
        return {
            "prompt": prompt,
            "multi_modal_data": {kind: shown for kind, shown in media.items() if shown is not None},
            "mm_processor_kwargs": video_kwargs,
        }


def messages_of(request: dict[str, Any], max_pixels: int) -> list[dict[str, Any]]:
    """What any of the four endpoints was asked, as Qwen's utilities read it."""
    asked = request.get("messages") or request.get("input") or request.get("prompt")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [part_of(part, max_pixels) for part in message["content"]]
    return messages


def part_of(part: dict[str, Any], max_pixels: int) -> dict[str, Any]:
    match part:
        case {"image_url": {"url": url} | str(url)}:
            return {"type": "image", "image": Image.open(content(url)), "max_pixels": max_pixels}
        case {"type": "image", "source": {"data": data}}:
            picture = Image.open(io.BytesIO(base64.b64decode(data)))
            return {"type": "image", "image": picture, "max_pixels": max_pixels}
        case {"video_url": {"url": url}}:
            return {"type": "video", "video": frames(content(url)), "max_pixels": max_pixels}
        case {"text": text}:
            return {"type": "text", "text": text}
    raise ValueError(f"This model reads text, pictures and videos, but no {part.get('type')}.")


def content(url: str) -> io.BytesIO:
    """Of a data URL. To fetch others for whoever may ask would give them what only this machine reaches."""
    if not url.startswith("data:"):
        raise ValueError("Pictures and videos come as data URLs.")
    return io.BytesIO(base64.b64decode(url.partition(",")[2]))


def frames(film: io.BytesIO) -> list[Image.Image]:
    with av.open(film) as opened:
        every = max(1, round((opened.streams.video[0].average_rate or 1) / FRAMES_PER_SECOND))
        decoded = enumerate(opened.decode(video=0))
        return [frame.to_image() for number, frame in decoded if number % every == 0]


def tools_of(request: dict[str, Any]) -> list[dict[str, Any]] | None:
    """As chat has them: Responses and Messages write them flat."""
    return [tool if "function" in tool else {"function": tool} for tool in request.get("tools") or []] or None


if __name__ == "__main__":
    config = LLMConfig(
        model_loading_config={
            "model_id": "qwen-vl",
            "model_source": os.environ.get("VISION_MODEL", "Qwen/Qwen2-VL-2B-Instruct"),
        },
        engine_kwargs={"limit_mm_per_prompt": {"image": 10, "video": 10}, "max_model_len": 4096},
        preprocessor=VisionInfo,
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
