"""docs/moving.md, run unchanged with a real PgBouncer. Its outputs are those of the commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import anyio.to_thread
import pytest

from subscriber.demo.servers import Server
from tests.docs.test_tutorials import bash, free_port
from tests.matrix import pgbouncer
from tests.matrix.programs import NotAvailable
from tools.docs.documents import blocks
from tools.docs.pause import picture, transactions

MOVING = Path("docs/moving.md")
SECONDS = 280
COUNTED = re.compile(
    r"^number of transactions actually processed: (\d+)\nnumber of failed .*: 0 .*\n(\d+)$", re.MULTILINE
)


def masked(output: str) -> list[str]:
    """Return the lines of an output without its figures, and without lines about tables that are left to copy."""
    lines = [" ".join(line.split()) for line in output.splitlines() if "tables_left" not in line]
    for pattern in (r"\b[0-9a-f]{64}\b", r"\b[0-9A-F]+/[0-9A-F]+\b", r"\d[\d,.:+-]*", r"(N min )?N m?s\b"):
        lines = [re.sub(pattern, "N", line) for line in lines]
    return [line.replace("KiB", "MiB") for line in lines]


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_shop_moves_behind_pgbouncer(publisher: Server, processes: Path) -> None:
    """PgBouncer and the servers run as the account that servers can run as, and all else as ourselves."""
    try:
        program, environment = pgbouncer.program()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    ports = {port: free_port() for port in ("54321", "54322", "6432")}
    install, servers, bouncer, *rest, end, stop = [
        re.sub(r"\b(54321|54322|6432)\b", lambda port: ports[port[0]], block) for block in blocks(MOVING, "sh")
    ]
    assert "make venv" in install
    account = publisher.account
    home = processes / "servers"
    home.mkdir()
    os.chown(home, account.uid, account.gid)
    for server in ("old", "new"):  # ended with the others, however we end
        (processes / f"{server}.pid").symlink_to(home / server / "postmaster.pid")
    (processes / "pgbouncer.pid").symlink_to(home / "pgbouncer.pid")
    libraries = f"export LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}\n" if environment else ""
    path = f"export PATH=$PATH:{Path(program).parent}\n"

    def run(script: str, **more: object) -> str:
        return bash(script, home, publisher.bin, seconds=SECONDS, **more)

    await anyio.to_thread.run_sync(lambda: run(servers, **account.keywords))
    try:
        await anyio.to_thread.run_sync(lambda: run(libraries + path + bouncer, **account.keywords))
        out = await anyio.to_thread.run_sync(run, "".join(rest) + end)
    finally:
        await anyio.to_thread.run_sync(lambda: run(stop, **account.keywords))
    promised = [masked(block) for block in blocks(MOVING, "text")]
    assert len(promised) == 8
    printed = masked(out)
    at = 0
    for block in promised:
        assert block[0] in printed[at:], f"{block[0]!r} is not printed:\n{out}"
        at = printed.index(block[0], at)
        assert printed[at : at + len(block)] == block
        at += len(block)
    counted = COUNTED.search(out)
    assert counted is not None, out
    assert counted[1] == counted[2], "an order is lost or there twice"


def test_the_picture_of_a_pause() -> None:
    log = "".join(f"0 {n} 900 0 {100 + n // 10} {n % 10 * 100_000}\n" for n in range(100) if not 50 <= n < 54) + "0 1 9"
    ends = transactions(log)
    assert ends[0] == 100.0
    drawn = picture(ends, 105.2)
    assert "no order for 0.50 s" in drawn
    assert drawn.count('class="old"') == 18 + 1  # of two seconds, and the legend
    assert drawn.count('class="new"') == 18 + 1
