"""A server of object storage, SeaweedFS, which speaks the protocol of S3 and decides conditional puts."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from subscriber.changelog.objects import ObjectPath
from subscriber.demo.object_store import BUCKET, ObjectStore


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """The address and credentials of a server that `object_server` starts. They are in the environment.

    A Spark session needs this fixture too: its processes have the environment of its start.
    """
    with pytest.MonkeyPatch.context() as patch:
        store = ObjectStore()
        for name, value in store.environment().items():
            patch.setenv(name, value)
        yield store


@pytest.fixture(scope="session")
def object_server(object_store: ObjectStore) -> Iterator[None]:
    """A server with a bucket."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                object_store.command(Path(place)), stdout=output, stderr=output, start_new_session=True
            )
        try:
            object_store.wait(lambda: process.poll() is None, log.read_text)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def objects(object_server: None) -> ObjectPath:
    """A prefix of its own in the object store."""
    return ObjectPath(f"s3://{BUCKET}", f"tests/{uuid4().hex}")
