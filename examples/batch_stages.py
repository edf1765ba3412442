"""Two models after one another: a small one rewrites the question, a larger one answers it.

Each stage has engines of its own, and both work at the same time: a row goes on as soon as it is done. On a
cluster give each config its own `accelerator_type`, `engine_kwargs` and `concurrency`; here both are the
embedded model, on CPU.
"""

import ray

from penstock.data import build_processor, vLLMEngineProcessorConfig

ASKED = {"temperature": 0, "max_tokens": 60}

small = vLLMEngineProcessorConfig(model_source="demo")  # e.g. meta-llama/Llama-3.1-8B-Instruct
large = vLLMEngineProcessorConfig(model_source="demo")  # e.g. ...-70B-Instruct, tensor_parallel_size=8

reformat = build_processor(
    small,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": f"What is {row['item']}?"}],
        "sampling_params": ASKED,
    },
    postprocess=lambda row: {"item": row["item"], "draft": row["generated_text"]},
)
answer = build_processor(
    large,
    preprocess=lambda row: {
        "messages": [
            {"role": "user", "content": f"What is {row['item']}?"},
            {"role": "assistant", "content": row["draft"]},
            {"role": "user", "content": f"What is {row['item']}?"},
        ],
        "sampling_params": ASKED,
    },
    postprocess=lambda row: {"draft": row["draft"], "answer": row["generated_text"]},
)

dataset = answer(reformat(ray.data.from_items(["Penstock", "a KV cache"])))
for row in dataset.take_all():
    print(row)
