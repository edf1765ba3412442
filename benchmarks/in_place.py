"""How soon a change reaches all gateways, from the call of `build_openai_app` on.

    python -m benchmarks.in_place [--gateways 2] [--rounds 3] [--rest 80]

Simulated models, Serve's loop at the pace of `penstock serve`. Connections that are kept, several for each
gateway, ask until each answer is by the new state. --rest: seconds without a change before each.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.command import refuse_strangers
from benchmarks.contestants import free_port
from benchmarks.table import Row, markdown

_APP = "in-place"
_CONNECTIONS = 12  # for each gateway: one of them reaches it
_HIGH, _LOW = 10_000, 200  # of a body's bytes
_LONG = {"model": "a", "prompt": 300 * "a", "max_tokens": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--shared", action="store_true", help="run though other Ray processes are there")
    options = parser.parse_args()
    refuse_strangers(options.shared)
    from penstock.serve.controller_pace import CALLBACK

    os.environ.setdefault("RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH", CALLBACK)
    import ray
    from ray import serve

    ray.init("local", num_cpus=8, log_to_driver=False, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    try:
        rows = measured(options.gateways, options.rounds, options.rest)
        print(markdown(["change", "built s", "in effect s", "serve.run s", "load"], rows))
    finally:
        serve.shutdown()
        ray.shutdown()


def measured(gateways: int, rounds: int, rest_s: float) -> list[Row]:
    """A row for each change of each round, with the machine's load after it."""
    port, rows = free_port(), list[Row]()
    clients = [httpx.Client(base_url=f"http://127.0.0.1:{port}") for _ in range(_CONNECTIONS * gateways)]

    def run(limit: int, models: Mapping[str, dict[str, Any]]) -> tuple[float, float]:
        """Seconds until the application was built, and until `serve.run` returned."""
        from ray import serve

        from penstock.serve import LLMConfig, build_openai_app

        begun = time.monotonic()
        configs = [
            LLMConfig(model_loading_config={"model_id": name}, llm_engine="sim", **given)
            for name, given in models.items()
        ]
        gateway = {"port": port, "processes": gateways, "max_body_bytes": limit}
        app = build_openai_app({"llm_configs": configs, "gateway": gateway})
        built = time.monotonic()
        serve.run(app, name=_APP, route_prefix=None)
        return built - begun, time.monotonic() - begun

    def change(what: str, done: Callable[[httpx.Client], bool], limit: int, **models: dict[str, Any]) -> None:
        for client in clients:
            client.get("/v1/models")
        time.sleep(rest_s)
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(run, limit, models)
            while not all(map(done, clients)):
                time.sleep(0.005)
            effect_s = time.monotonic() - begun
            built_s, ran_s = running.result()
        figures = built_s, effect_s, ran_s, os.getloadavg()[0]
        rows.append([what, *(f"{figure:.2f}" for figure in figures)])

    def names(client: httpx.Client) -> set[str]:
        return {model["id"] for model in client.get("/v1/models").json()["data"]}

    def refused(client: httpx.Client) -> bool:
        return client.post("/v1/completions", json=_LONG).status_code == 413

    run(_HIGH, {"a": {}, "b": {}})
    for number in range(rounds):
        alias = f"x{number}"
        models: dict[str, dict[str, Any]] = {"a": {"aliases": [alias]}, "b": {}}
        change("an alias", lambda client, alias=alias: alias in names(client), _HIGH, **models)
        change("a limit", refused, _LOW, **models)
        change("a model less", lambda client: "b" not in names(client), _LOW, a=models["a"])
        change("a model more", lambda client: "b" in names(client), _HIGH, **models)
    return rows


if __name__ == "__main__":
    main()
