"""Batch: a dataset in, the same with answers out. Nothing runs until rows are asked for."""

import ray

from penstock.data import build_processor, vLLMEngineProcessorConfig

config = vLLMEngineProcessorConfig(model_source="demo", concurrency=1, batch_size=64)

processor = build_processor(
    config,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": f"What is {row['item']}?"}],
        "sampling_params": {"temperature": 0, "max_tokens": 60},
    },
    postprocess=lambda row: {"term": row["item"], "meaning": row["generated_text"]},
)

dataset = processor(ray.data.from_items(["Penstock", "a KV cache", "prefill"]))
for row in dataset.take_all():
    print(row["term"], "-", row["meaning"])
