"""A local S3 server in a process of its own, and what was read of it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import boto3
from botocore.config import Config

from benchmarks.contestants import free_port

NAME = "adapters"
_READY_S = 30.0


class Bucket:
    """Ends with its `stop`, or with whoever ends the descendants of this process."""

    def __init__(self, folder: Path) -> None:
        """folder: for its log."""
        port = free_port()
        self._log = folder / "s3.log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.environment: Mapping[str, str] = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="bench",
            aws_secret_access_key="bench",
            config=Config(connect_timeout=1, retries={"total_max_attempts": 1}),
        )
        self._create()

    def upload(self, folder: Path, name: str) -> None:
        """The files of an adapter, as `s3://adapters/NAME`."""
        for file in folder.iterdir():
            self._client.upload_file(str(file), NAME, f"{name}/{file.name}")

    def reads(self, name: str) -> int:
        """How often the weights of an adapter have been downloaded."""
        return len(re.findall(rf"GET /{NAME}/{re.escape(name)}/\S*\.safetensors", self._log.read_text()))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _create(self) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                self._client.create_bucket(Bucket=NAME)
                return
            except Exception:  # botocore has many for a server that does not listen yet
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.1)
