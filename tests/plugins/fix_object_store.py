"""A server of object storage, SeaweedFS, which speaks the protocol of S3 and decides conditional puts.

It also has a REST catalog of Iceberg, which chooses the locations of its tables.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from subscriber.changelog.objects import ObjectPath
from subscriber.demo.object_store import BUCKET, KEY, SECRET, ObjectStore, free_ports
from subscriber.demo.servers import watched_directory

_KINDS = ("master", "filer")  # the parts of the server that its shell needs
# Each bucket, also that of a catalog, takes seven files at its first object. Without another one, the answer is 500.
_VOLUMES = 1000


class Server(ObjectStore):
    """The object store with a REST catalog."""

    def __init__(self) -> None:
        super().__init__()
        (self._catalog_port,) = free_ports(1)

    def command(self, directory: Path, volumes: int = _VOLUMES) -> list[str]:
        port = {"-s3.port.iceberg=0": f"-s3.port.iceberg={self._catalog_port}"}
        self._command = [port.get(option, option) for option in super().command(directory, volumes)]
        return self._command

    def create_catalog(self) -> dict[str, str]:
        """Create a catalog. Returns its configuration."""
        name = f"tables{uuid4().hex[:12]}"
        options = dict(option.split("=", 1) for option in self._command if "=" in option)
        addresses = [f"-{kind}=127.0.0.1:{options[f'-{kind}.port']}.{options[f'-{kind}.port.grpc']}" for kind in _KINDS]
        subprocess.run(
            [self._command[0], "shell", *addresses],
            input=f"s3tables.bucket -create -name {name} -account 000000000000\nexit\n",
            text=True,
            check=True,
            capture_output=True,
            timeout=60,
        )
        uri = f"http://127.0.0.1:{self._catalog_port}"
        tokens = {"OAUTH2_SERVER_URI": f"{uri}/v1/oauth/tokens", "CREDENTIAL": f"{KEY}:{SECRET}"}
        return {"TYPE": "rest", "URI": uri, "WAREHOUSE": f"s3://{name}", **tokens}


@pytest.fixture(scope="session")
def object_store() -> Iterator[Server]:
    """The address and credentials of a server that `object_server` starts. They are in the environment.

    A Spark session needs this fixture too: its processes have the environment of its start.
    """
    with pytest.MonkeyPatch.context() as patch:
        store = Server()
        for name, value in store.environment().items():
            patch.setenv(name, value)
        yield store


@pytest.fixture(scope="session")
def object_server(object_store: Server) -> Iterator[None]:
    """A server with a bucket. It ends with this process."""
    with watched_directory() as place:
        log = place / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                object_store.command(place), stdout=output, stderr=output, start_new_session=True
            )
        (place / "server.pid").write_text(f"{process.pid}\n")
        try:
            object_store.wait(lambda: process.poll() is None, log.read_text)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            object_store.remove_sockets()


@pytest.fixture
def objects(object_server: None) -> ObjectPath:
    """A prefix of its own in the object store."""
    return ObjectPath(f"s3://{BUCKET}", f"tests/{uuid4().hex}")
