"""Contestants with adapters: Penstock with a folder and a bucket of them, Ray Serve LLM with the bucket."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.asking import TRAINED, copy_name
from benchmarks.bucket import NAME, Bucket
from benchmarks.contestants import Contestant, penstock_serve
from benchmarks.workload import KV_BYTES, PLACES, RANK, Workload
from recipes import shelf


def stocked(
    folder: Path, bucket: Bucket, local: Mapping[str, int], remote: Mapping[str, int]
) -> dict[str, Any]:
    """A `lora_config` with so many copies of each kind, in `folder` and in the bucket."""
    trained = shelf.made("adapters")
    for kind, count in local.items():
        for number in range(count):
            shutil.copytree(trained / TRAINED[number % len(TRAINED)], folder / copy_name(kind, number))
    names = [copy_name(kind, number) for kind, count in remote.items() for number in range(count)]
    for name in names:
        bucket.upload(trained / name.rpartition("-")[2], name)
    return {
        "dynamic_lora_loading_path": str(folder),
        "adapters": {name: f"s3://{NAME}/{name}" for name in names},
        "max_num_adapters_per_replica": PLACES,
    }


def penstock(bucket: Bucket, lora_config: Mapping[str, Any]) -> Contestant:
    """`penstock serve`, whose cache of downloads is empty at first."""

    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        words = penstock_serve(workload, port, folder)
        config = folder / "bench.yaml"
        said = yaml.safe_load(config.read_text()) | {"lora_config": dict(lora_config)}
        said["engine_kwargs"] |= {"max_lora_rank": RANK, "kv_cache_memory_bytes": KV_BYTES}
        config.write_text(yaml.safe_dump(said))
        return words

    def environment(folder: Path) -> dict[str, str]:
        return {**bucket.environment, "PENSTOCK_CACHE": str(folder / "cache")}

    return Contestant("penstock", "penstock serve", command, environment=environment)


def peer(bucket: Bucket) -> Contestant:
    """Ray Serve LLM, which reads the endpoint from a variable of its own."""

    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        words = ["ray-llm-adapters", str(port), str(workload.model), workload.executor]
        return [sys.executable, "-m", "benchmarks.serve_apps", *words]

    def environment(folder: Path) -> dict[str, str]:
        return {**bucket.environment, "AWS_ENDPOINT_URL_S3": bucket.environment["AWS_ENDPOINT_URL"]}

    return Contestant("ray-llm", "Ray Serve LLM", command, environment=environment)
