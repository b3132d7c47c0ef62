"""A bucket of Google Cloud Storage, which a program of the tests stands for: google_storage.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from subscriber.changelog.objects import ObjectPath
from subscriber.demo.object_store import BUCKET, free_ports
from subscriber.demo.servers import watched_directory
from tests.plugins import google_storage

TIMEOUT = 30.0  # seconds for the server to start


@pytest.fixture(scope="session")
def google_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that `google_server` starts. The environment has its address and no password.

    As `object_store`, this is for a Spark session, too.
    """
    (port,) = free_ports(1)
    account = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}
    file = tmp_path_factory.mktemp("google") / "account.json"
    file.write_text(json.dumps({**account, **dict.fromkeys(("client_email", "private_key", "private_key_id"), "")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
        patch.setenv("GOOGLE_ALLOW_HTTP", "true")
        yield port


@pytest.fixture(scope="session")
def google_server(google_store: int) -> Iterator[None]:
    """A server with a bucket. Its own process: Delta's library does not release the interpreter during a request."""
    with watched_directory() as directory:
        process = subprocess.Popen(
            [sys.executable, Path(google_storage.__file__), str(google_store)], start_new_session=True
        )
        (directory / "server.pid").write_text(f"{process.pid}\n")
        try:
            until = time.monotonic() + TIMEOUT
            while True:
                try:
                    ObjectPath(f"gs://{BUCKET}", "ready").put(b"")
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def google_objects(google_server: None) -> ObjectPath:
    """A prefix of its own in the bucket."""
    return ObjectPath(f"gs://{BUCKET}", f"tests/{uuid4().hex}")
