"""The object store of the tests and of the demo leaves no file behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from subscriber.demo.object_store import ObjectStore


def test_the_sockets_of_a_server_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    command = store.command(tmp_path)
    ports = re.findall(r"port(?:\.grpc)?=(\d+)", " ".join(command))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        store.wait(lambda: process.poll() is None, lambda: "")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        store.remove_sockets()
    assert ports
    assert [file for port in ports for file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] == []
