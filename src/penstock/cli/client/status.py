"""`penstock models` and `penstock status`: what a running service serves, and how well."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from penstock.cli.client.service import Service
from penstock.cli.models.options import API_KEY_NAMES, HERE, KEY_HINT, Json, Key, Url
from penstock.errors import Error

_ANSWER_S = 30.0
_UNAVAILABLE = 1
_ADMIN_KEY = "PENSTOCK_ADMIN_KEY"


def show_models(url: Url = HERE, api_key: Key = None, as_json: Json = False) -> int:
    """List what a running service serves: models, aliases, adapters, and their context windows."""
    service = Service(url, api_key, key_hint=KEY_HINT)
    found = service.json("GET", "/v1/models", timeout_s=_ANSWER_S, has="data")["data"]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0
    width = max((len(model["id"]) for model in found), default=0)
    for model in found:
        print(f"{model['id']:<{width}}  {_described(model)}".rstrip())
    return 0


def _described(model: Mapping[str, Any]) -> str:
    parent, root, length = (model.get(name) for name in ("parent", "root", "max_model_len"))
    if parent:
        return f"adapter of {parent}"
    if root and root != model["id"]:
        return f"alias of {root}"
    return f"{length:,} tokens" if length else "no replica has said its context window yet"


def show_status(url: str, api_key: str | None, *, as_json: bool, own: bool = False) -> int:
    """Prints the replicas of each model. Exit code: 0 when every model can answer, 1 when one cannot.

    own: the service is this user's on this machine, so its certificate is not checked.
    Raises: Error when the service does not answer.
    """
    service = Service(url, api_key or os.environ.get(_ADMIN_KEY), key_hint=KEY_HINT, own=own)
    health = service.json("GET", "/health", timeout_s=_ANSWER_S, has="status")
    version, engines = _versions(service)
    models = {name: {**counts, **engines.get(name, {})} for name, counts in health.get("models", {}).items()}
    if as_json:
        found = {"url": service.url, "status": health["status"], "version": version, "models": models}
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print(f"{service.url}  {health['status']}{f', Penstock {version}' if version else ''}")
        for name, model in models.items():
            print(f"  {name}  {_state(model)}")
        if "models" not in health:
            print(
                f"  Models are listed with a key: with --api-key, in {API_KEY_NAMES[0]} or in {_ADMIN_KEY}."
            )
    return 0 if health["status"] == "ok" else _UNAVAILABLE


def _versions(service: Service) -> tuple[str | None, Mapping[str, Mapping[str, Any]]]:
    """Penstock's, and each model's engine with its version; nothing for a key that may not ask."""
    try:
        found = service.json("GET", "/version", timeout_s=_ANSWER_S)
    except Error:
        return None, {}
    return found.get("version"), found.get("models", {})


def _state(model: Mapping[str, Any]) -> str:
    ready, replicas, resting = (model.get(name, 0) for name in ("ready", "replicas", "resting"))
    wanted = max(model.get("wanted", 0), replicas)
    parts = [f"{ready} of {wanted} replicas ready"]
    if resting:
        parts.append(f"{resting} asleep or paused")
    if missing := wanted - ready - resting:
        parts.append(f"{missing} starting or restarting")
    if (share := model.get("share")) is not None:
        parts.append(f"{share:.0%} of the requests")
    if canary := model.get("canary"):
        parts.append(f"canary {canary}")
    if engine := model.get("engine"):
        parts.append(f"{engine} {model.get('version') or ''}".rstrip())
    return ", ".join(parts)
