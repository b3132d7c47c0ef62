"""A server of object storage, SeaweedFS, which speaks the protocol of S3 and decides conditional puts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import from_url

from subscriber.changelog.objects import ObjectPath

KEY, SECRET = "tester", "secret of the tester"
PORTS = ("master", "volume", "filer", "s3")
TIMEOUT = 60.0  # seconds for the server to start


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _arguments(directory: Path, ports: list[int]) -> list[str]:
    found = [
        str(Path(sys.executable).with_name("weed")),
        f"-logdir={directory}",
        "server",
        "-filer",
        "-s3",
        f"-dir={directory}",
    ]
    found += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20"]
    found += ["-master.volumeSizeLimitMB=64"]
    for name, port, grpc in zip(PORTS, ports[::2], ports[1::2], strict=True):
        found += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    config = directory / "s3.json"
    access = {"accessKey": KEY, "secretKey": SECRET}
    config.write_text(json.dumps({"identities": [{"name": "t", "credentials": [access], "actions": ["Admin"]}]}))
    return [*found, f"-s3.config={config}"]


@pytest.fixture(scope="session")
def object_ports() -> Iterator[list[int]]:
    """The ports of a server that `object_server` starts. Its address and credentials are in the environment.

    A Spark session needs this fixture too: its processes have the environment of its start.
    """
    with pytest.MonkeyPatch.context() as patch:
        ports = _free_ports(2 * len(PORTS))
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports[6]}")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_REGION", "us-east-1")
        yield ports


@pytest.fixture(scope="session")
def object_server(object_ports: list[int]) -> Iterator[None]:
    """A server with the bucket `bucket`."""
    with tempfile.TemporaryDirectory() as place:
        with (Path(place) / "log").open("wb") as log:
            process = subprocess.Popen(
                _arguments(Path(place), object_ports), stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait(process, Path(place) / "log")
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    client = from_url("s3://bucket", retry_config={"max_retries": 0})
    until, error = time.monotonic() + TIMEOUT, ""
    while time.monotonic() < until and process.poll() is None:
        try:
            obstore.put(client, "ready", b"")  # creates the bucket
            return
        except BaseError as failed:
            error = str(failed)
        time.sleep(0.2)
    raise RuntimeError(f"no object store: {error}\n{log.read_text()[-2000:]}")


@pytest.fixture
def objects(object_server: None) -> ObjectPath:
    """A prefix of its own in the object store."""
    return ObjectPath("s3://bucket", f"tests/{uuid4().hex}")
