"""Pictures from a bucket, made smaller on CPUs, named by a vision model: three steps that overlap.

Fetching waits for the network and resizing for CPUs, so both have tasks of their own, beside the engine.
`PICTURES` is a folder or bucket URL, `VISION_MODEL` a vision-language model.
"""

import io
import os

import ray
from PIL import Image

from penstock.data import build_processor, vLLMEngineProcessorConfig


def smaller(picture: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail((448, 448))
    return image


def ask(row: dict) -> dict:
    picture = smaller(row["bytes"])
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20}


processor = build_processor(
    vLLMEngineProcessorConfig(model_source=os.environ["VISION_MODEL"], engine_kwargs={"max_model_len": 1024}),
    preprocess=ask,
    postprocess=lambda row: {"path": row["path"], "seen": row["generated_text"]},
    preprocess_map_kwargs={"num_cpus": 1},
)

pictures = ray.data.read_binary_files(os.environ["PICTURES"], include_paths=True)
for row in processor(pictures).take_all():
    print(row["path"], "-", row["seen"])
