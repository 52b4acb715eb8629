"""An S3 server on loopback, with one bucket called ``caches``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "caches"


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Fsspec's options for it, while it runs."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {
            "key": "key-of-tests", "secret": "secret-of-tests",
            "endpoint_url": f"http://{host}:{port}",
        }  # fmt: skip
        # what the machine's own user has configured must not be used, nor be needed
        with patch.dict(os.environ, AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="1"):
            s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir(BUCKET)
            yield options
    finally:
        server.stop()
