"""A server of S3 on this machine's loopback, and a bucket in it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
import torch.distributed as dist
from moto.server import ThreadedMotoServer

BUCKET = "runs-bucket"
URI = f"s3://{BUCKET}/r/ck"


@dataclass
class Store:
    """The server; rank 0 alone has it."""

    server: ThreadedMotoServer | None
    client: Any

    def names(self, prefix: str) -> list[str]:
        """Names of objects, of uploads that have ended."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return sorted(item["Key"] for item in found.get("Contents", []))


@contextlib.contextmanager
def store_on_loopback() -> Generator[Store]:
    """Has Composer's object store find a server with an empty bucket. Collective: yes."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server, address = None, [""]
    if dist.get_rank() == 0:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        address[0] = "http://{}:{}".format(*server.get_host_and_port())
    dist.broadcast_object_list(address)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "S3_ENDPOINT_URL": address[0],
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=address[0])
        if server is not None:
            client.create_bucket(Bucket=BUCKET)
        dist.barrier()
        try:
            yield Store(server, client)
        finally:
            if server is not None:
                server.stop()
