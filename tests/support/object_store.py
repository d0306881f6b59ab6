"""A server of S3 on this machine's loopback, with one bucket, and Composer's way to it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from composer import Callback
from composer.callbacks import CheckpointSaver
from moto.moto_api._internal.models import moto_api_backend
from moto.server import ThreadedMotoServer

BUCKET = "runs-bucket"
URI = f"s3://{BUCKET}/r/ck"


@contextlib.contextmanager
def served(port: int = 0) -> Generator[str]:
    """Yields the address of a server in this process, with an empty bucket.

    Args:
        port: of a server that comes back; what it held is still there. 0 is a new one.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        if not port:
            moto_api_backend.reset()
            with found_by_composer(url) as client:
                client.create_bucket(Bucket=BUCKET)
        yield url
    finally:
        server.stop()


@contextlib.contextmanager
def found_by_composer(url: str) -> Generator[Any]:
    """Has Composer's object store find the server while a block runs; yields a client."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "S3_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }.items():
            patch.setenv(name, value)
        yield boto3.client("s3", endpoint_url=url)


def names_in(client: Any, prefix: str = "r/ck/") -> list[str]:
    """Names of the objects below a prefix, of uploads that have ended."""
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return sorted(item["Key"].removeprefix(prefix) for item in found)


class QuickUploads(Callback):
    """Has Composer upload in threads, and look twice a second for a checkpoint in the store.

    Its processes import all of Composer for seconds, and it looks twice a minute.
    """

    def __init__(self) -> None:
        self._executors: list[ThreadPoolExecutor] = []

    def init(self, state: Any, logger: Any) -> None:
        del logger
        for saver in state.callbacks:
            if isinstance(saver, CheckpointSaver) and saver.remote_uploader is not None:
                saver._symlink_upload_wait_before_next_try_in_seconds = 0.5
                uploader: Any = saver.remote_uploader
                self._executors = [ThreadPoolExecutor(1), ThreadPoolExecutor(2)]
                uploader.upload_executor, uploader.check_remote_files_exist_executor = (
                    self._executors
                )

    def end(self) -> None:
        """Drops uploads that have not begun: they would go to the server of the next test."""
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)
