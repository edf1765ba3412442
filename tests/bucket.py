"""A local S3 server, spoken to as Amazon's: by AWS_ENDPOINT_URL and credentials in the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

SECRET = "s3-secret-of-the-test"


@dataclass(frozen=True)
class S3:
    """url: where it listens; environment: what a process needs to read it."""

    url: str
    environment: dict[str, str]
    client: Any

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Every file below `folder`. Gives the URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder).as_posix()}")
        return f"s3://{bucket}/{prefix}"

    @contextmanager
    def buckets(self, *names: str) -> Iterator[None]:
        """Empty ones; they are gone afterwards."""
        for name in names:
            self.client.create_bucket(Bucket=name)
        try:
            yield
        finally:
            for name in names:  # every server of a process shows the same ones
                _drop(self.client, name)


@contextmanager
def s3_server(*buckets: str) -> Iterator[S3]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key=SECRET,
    )
    s3 = S3(environment["AWS_ENDPOINT_URL"], environment, client)
    try:
        with s3.buckets(*buckets):
            yield s3
    finally:
        server.stop()


def _drop(client: Any, name: str) -> None:
    for found in client.list_objects_v2(Bucket=name).get("Contents", []):
        client.delete_object(Bucket=name, Key=found["Key"])
    client.delete_bucket(Bucket=name)
