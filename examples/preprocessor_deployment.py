"""A preprocessor that needs CPUs of its own: a deployment that Serve scales by itself, on any node.

The code is the same as in a replica; any option but `arguments` makes it a deployment.
"""

import time
from typing import Any

from ray import serve

from penstock.serve import LLMConfig, LLMRouter

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Hard:
    """Works for a tenth of a second, as one who decodes and resizes pictures does."""

    def __call__(self, request: dict[str, Any]) -> Any:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return {"prompt": PROMPT.format(request["messages"][-1]["content"])}, {"temperature": 0}


config = LLMConfig(
    model_loading_config={"model_id": "helper", "model_source": "demo"},
    preprocessor=Hard,
    preprocessor_options={
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 2},
        "ray_actor_options": {"num_cpus": 1},
        "timeout_s": 30,
    },
)
serve.run(LLMRouter.as_deployment().bind([config]))
