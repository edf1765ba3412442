"""What Ray's LLM configs give back to a program that reads them: a peer of ours for a unit test.

    python -m benchmarks.ray_configs '[["LLMConfig", {"model_loading_config": {"model_id": "m"}}]]'

Prints, for each pair of a class and its arguments, what `read` finds. In a process of its own, since it
imports Ray's LLM packages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_PROPERTIES = ("model_id", "max_request_context_length")


def read(config: Any) -> dict[str, list[Any]]:
    """The type's name and the value of each field, by name; None for values that JSON does not have."""
    found = {name: getattr(config, name, None) for name in (*type(config).model_fields, *_PROPERTIES)}
    plain = (str, int, float, bool, dict, list)
    return {
        name: [type(value).__name__, value if type(value) in plain else None] for name, value in found.items()
    }


def main() -> None:
    from ray.data.llm import vLLMEngineProcessorConfig
    from ray.serve.llm import LLMConfig, LoraConfig, ModelLoadingConfig

    kinds = {
        kind.__name__: kind for kind in (LLMConfig, LoraConfig, ModelLoadingConfig, vLLMEngineProcessorConfig)
    }
    print(json.dumps([read(kinds[name](**values)) for name, values in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
