"""What `penstock serve` says when it serves: the address, and requests that work when they are pasted."""

import json
import os
import shlex
from collections.abc import Sequence

from penstock.cli.models.options import API_KEY_NAMES
from penstock.config import GatewayConfig, LLMConfig

_QUESTION = "What is Penstock?"
_EVERYWHERE = ("0.0.0.0", "::")


def greeting(gateway: GatewayConfig, configs: Sequence[LLMConfig], seconds: float) -> str:
    """Units: seconds since the command was started."""
    url, key = gateway.local_url, _key_variable(gateway)
    ids = ", ".join(config.model_id for config in configs)
    has_own_keys = gateway.keyed and gateway.api_key is None
    opened = "" if gateway.host not in _EVERYWHERE else f" (listening on {gateway.host}: every network)"
    return "\n\n".join(
        [
            f"Serving {ids} at {url}{opened} after {seconds:.1f} s. Ctrl-C stops.",
            *([_TENANTS.format(name=key)] if has_own_keys else []),
            _curl(url, key, configs[0]),
            _python(url, key, configs[0]),
            f"penstock chat{'' if url == 'http://127.0.0.1:8000' else f' --url {url}'}",
        ]
    )


def _key_variable(gateway: GatewayConfig) -> str | None:
    """The variable that holds the gateway's key, or should."""
    if gateway.api_key is None:
        return API_KEY_NAMES[0] if gateway.keyed else None
    key = gateway.api_key.get_secret_value()
    return next((name for name in API_KEY_NAMES if os.environ.get(name) == key), API_KEY_NAMES[0])


def _pools(config: LLMConfig) -> bool:
    return config.engine_kwargs.get("runner") == "pooling"


def _curl(url: str, key: str | None, config: LLMConfig) -> str:
    path, asked = "chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
    if _pools(config):
        path, asked = "embeddings", {"input": _QUESTION}
    bearer = f' -H "Authorization: Bearer ${key}"' if key else ""
    data = shlex.quote(json.dumps({"model": config.model_id, **asked}, ensure_ascii=False))
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{bearer} -d {data}"


def _python(url: str, key: str | None, config: LLMConfig) -> str:
    api_key = f'os.environ["{key}"]' if key else '"none"'
    model, question = json.dumps(config.model_id), json.dumps(_QUESTION)
    call = _PYTHON_EMBEDDINGS if _pools(config) else _PYTHON_CHAT
    return "\n".join(
        [
            *(["import os", ""] if key else []),
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{url}/v1", api_key={api_key})',
            call.format(model=model, question=question),
        ]
    )


_TENANTS = """\
Clients send keys of tenants, as `penstock keys create` has printed them. For what follows:
export {name}=KEY"""

_PYTHON_CHAT = """\
messages = [{{"role": "user", "content": {question}}}]
answer = client.chat.completions.create(model={model}, messages=messages)
print(answer.choices[0].message.content)"""

_PYTHON_EMBEDDINGS = """\
answer = client.embeddings.create(model={model}, input={question})
print(len(answer.data[0].embedding))"""
