"""examples/shop: its own tests, and two processes of uvicorn, one with --reload, with a target that loses them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from examples.shop.test_app import (  # noqa: F401  collected here
    PRODUCT,
    test_a_request_waits_for_a_position,
    test_a_restart_of_the_target,
    test_a_table_that_cannot_be_copied_does_not_keep_the_shop_closed,
    test_products_are_there_when_the_application_has_started,
)
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")

EXAMPLES = Path(__file__).parents[2] / "examples"
LISTENS = r"Uvicorn running on (http://127\.0\.0\.1:\d+)"


@dataclass
class Replica:
    """A process of uvicorn."""

    process: subprocess.Popen[bytes]
    log: Path

    async def wait_for(self, pattern: str, count: int = 1) -> str:
        with anyio.fail_after(60):
            while len(matches := re.findall(pattern, self.log.read_text())) < count:
                assert self.process.poll() is None, self.log.read_text()
                await anyio.sleep(0.05)
        return str(matches[-1])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def replica(folder: Path, name: str, *options: str) -> Iterator[Replica]:
    """Run the application from a copy of its files."""
    application = ["--factory", "examples.shop.app:from_environment", "--port", "0"]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", *application, *options],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Replica(process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def prices(shop: httpx.AsyncClient, number: int) -> None:
    """Wait until the application shows that number of products."""
    with anyio.fail_after(60):
        while (answer := await shop.get("/products")).status_code != 200 or len(answer.json()) != number:
            await anyio.sleep(0.1)


async def healthy(shop: httpx.AsyncClient) -> None:
    with anyio.fail_after(60):
        while (await shop.get("/health")).status_code != 200:
            await anyio.sleep(0.1)


async def test_two_processes_share_a_subscription_while_one_reloads(
    source_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for database in (source_db, target_db):
        await database.execute(PRODUCT)
    await source_db.execute("CREATE PUBLICATION shop FOR TABLE product", "INSERT INTO product VALUES (1, 'tea', 4)")
    shutil.copytree(EXAMPLES / "shop", tmp_path / "examples" / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("SHOP_DATABASE", target_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))
    monkeypatch.setenv("SHOP_SOURCE", source_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))
    with replica(tmp_path, "one", "--reload") as one, replica(tmp_path, "two") as two:
        addresses = [await each.wait_for(LISTENS) for each in (one, two)]
        for each in (one, two):
            await each.wait_for("Application startup complete")
        async with (
            httpx.AsyncClient(base_url=addresses[0], timeout=60) as first,
            httpx.AsyncClient(base_url=addresses[1], timeout=60) as second,
        ):
            for shop in (first, second):
                await prices(shop, 1)
            # The end of a request, after its response: uvicorn would log the error of a session that ends then.
            await target_db.wait_for(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND state = 'idle in transaction'",
                0,
            )
            await target_db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await source_db.execute("INSERT INTO product VALUES (2, 'jam', 3)")
            for shop in (first, second):
                await prices(shop, 2)
                await healthy(shop)
            with (tmp_path / "examples/shop/app.py").open("a") as file:
                file.write("# edited\n")
            await one.wait_for("Application startup complete", 2)
            await source_db.execute("INSERT INTO product VALUES (3, 'oil', 9)")
            for shop in (first, second):
                await prices(shop, 3)
                await healthy(shop)
        for each in (one, two):
            assert await asyncio.to_thread(each.end) in (0, -signal.SIGTERM)
        for each in (one, two):
            assert "Traceback" not in each.log.read_text()
