"""--app package.module:name of `subscriber run` and `subscriber exec`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import typer

import subscriber
from subscriber.cli.app_option import load_app
from tests.plugins.fix_cluster import Database
from tests.processes import opened

SHOP = """
import subscriber
from subscriber import App, Hook, Hooks

async def mine(conflict):
    return "keep_local"

subscriber_app = App(hooks={"s": Hooks({"person": Hook(mask={"name": str.upper})})}, resolvers={"mine": mine})
strict = App(on_error="raise", hooks=subscriber_app.hooks)
number = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop_replication.py").write_text(SHOP)
    (tmp_path / "shop_broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_option_app_loads_an_app_by_its_name() -> None:
    assert load_app(None) == subscriber.App()
    assert set(load_app("shop_replication:subscriber_app").resolvers) == {"mine"}
    for name, message in {
        "shop_replication": "is not of the form package.module:name",
        "shop_replikation:app": 'there is no module "shop_replikation" in ',
        "shop_replication:subscriber_ap": 'has no "subscriber_ap". Perhaps you meant "subscriber_app".',
        "shop_replication:number": "is no subscriber.App, but a int",
    }.items():
        with pytest.raises(typer.BadParameter) as raised:
            load_app(name)
        assert message in str(raised.value)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_app("shop_broken:app")


def test_an_app_with_invalid_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match=r"only=\['s'\]"):
        subscriber.App(only="s")
    with pytest.raises(ValueError, match="on_error is 'rais'"):
        subscriber.App(on_error="rais")  # type: ignore[arg-type]


async def test_hooks_of_the_daemon(folder: Path, source_db: Database, target_db: Database) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE person (id int PRIMARY KEY, name text)")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES", "INSERT INTO person VALUES (1, 'ann')")
    command = [sys.executable, "-m", "subscriber"]
    create = f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p"
    arguments = ["exec", "--target", target_db.dsn(), "--app", "shop_replication:subscriber_app", create]
    path = os.pathsep.join([str(Path(subscriber.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    await anyio.run_process([*command, *arguments], cwd=folder, env=env)
    arguments = ["run", "--target", target_db.dsn(), "--app", "shop_replication:strict", "--log-format", "json"]
    async with opened(
        [*command, *arguments], cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            await target_db.wait_for("SELECT name FROM person", "ANN", timeout=60)
            await target_db.execute("INSERT INTO person VALUES (2, 'in the way')")
            await source_db.execute("INSERT INTO person VALUES (2, 'bob')")
            with anyio.fail_after(60):
                assert await process.wait() == 3  # on_error="raise"
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
