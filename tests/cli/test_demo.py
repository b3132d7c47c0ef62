from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from subscriber.demo.shop import Acknowledgement, Shop, timeline
from tests.processes import opened

COMMAND = [sys.executable, "-m", "subscriber", "demo"]


@pytest.mark.timeout(400)  # Spark starts twice
async def test_both_sides_are_identical_after_two_kills() -> None:
    with anyio.fail_after(380):
        done = await anyio.run_process([*COMMAND, "--seconds", "3"], check=False, stderr=subprocess.STDOUT)
    out = done.stdout.decode()
    assert done.returncode == 0, out
    assert re.search(r"(?m)^identical at [0-9A-F]+/[0-9A-F]+:$", out), out
    assert "kill -9 of the worker, 2 times" in out
    assert "  4 tables of a lake compared, written by Spark, on Java" in out
    assert "DIFFERENT" not in out


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let programs started here receive SIGINT, as from a terminal. A shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
async def test_nothing_is_left_behind(tmp_path: Path, number: signal.Signals, interruptible: None) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:  # pytest closes them; the servers' account has to get in
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)
    async with opened([*COMMAND, "--seconds", "30"], env=environment, stderr=None) as process:
        assert process.stdout is not None
        out = ""
        with anyio.fail_after(60):
            while "subscriber run: started" not in out:
                out += (await process.stdout.receive()).decode()
        pids = [int(re.findall(r"started, pid (\d+)", out)[0])]
        process.send_signal(number)
        with anyio.fail_after(20):
            await process.wait()
    pids += [int(file.read_text().split()[0]) for file in tmp_path.glob("*/*/data/postmaster.pid")]
    with anyio.fail_after(30):
        while list(tmp_path.iterdir()) or any(Path(f"/proc/{pid}").exists() for pid in pids):
            await anyio.sleep(0.1)


def test_a_timeline_shows_the_pause() -> None:
    shop = Shop(["old", "new"])
    times = [(0, 0.05 * number) for number in range(20)] + [(1, 1.5 + 0.05 * number) for number in range(20)]
    shop.acknowledged = [Acknowledgement(at, server, number, "") for number, (server, at) in enumerate(times)]
    last, first = shop.pause()
    assert first - last == pytest.approx(0.55)
    old, new = timeline(shop, ("old", "new"), around=(first + last) / 2, width=0.2, columns=10)
    assert re.fullmatch(r" *old [▁-█]+ +", old)
    assert re.fullmatch(r" *new  +[▁-█]+", new)
    assert len(old) == len(new)


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_shop_moves_there_and_back_and_there() -> None:
    with anyio.fail_after(380):
        done = await anyio.run_process([*COMMAND, "--migrate", "--seconds", "3"], check=False, stderr=subprocess.STDOUT)
    out = done.stdout.decode()
    assert done.returncode == 0, out
    assert re.search(r"(?m)^3 moves: [\d,]+ acknowledged orders, none lost, none twice$", out), out
    assert out.count("no application could write for") == 3
    (report,) = re.findall(r"(?m)^ +report: (.+)$", out)
    try:
        assert "<h1" in Path(report).read_text()
    finally:
        Path(report).unlink()
