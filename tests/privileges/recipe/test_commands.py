"""Each command runs with exactly the roles of the recipe, or says which role it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from subscriber.cli.main import app
from tests.privileges.recipe.scene import PUBLISHER, Scene, named
from tests.privileges.recipe.test_check import PAIRS

pytestmark = pytest.mark.xdist_group("recipe")

BY_ADMINISTRATOR = 3
# Arguments, exit status, and a part of the output.
COMMANDS = [
    ("exec 'ALTER SUBSCRIPTION s REFRESH PUBLICATION'", 0, ""),
    ("exec 'ALTER SUBSCRIPTION s REFRESH SEQUENCES'", 0, ""),
    ("exec 'ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s ENABLE'", 0, ""),
    ("status s", 0, "s: "),
    ("check s", 0, "0 errors"),
    ("verify s", 0, "identical"),
    ("verify --all", 0, "identical"),
    ("repair s --dry-run", 0, ""),
    ("repair s", 0, "0 rows repaired"),
    ("repair s --history", 0, ""),
    ("resync s app.orders", 0, "synchronized"),
    ("resync s app.orders --truncate", 0, "copied"),
    ("reseed s", 0, "streams from"),
    ("quarantine list s", 0, ""),
    ("tail --source {publisher} --publication p --slot absent", 3, "SELECT pg_create_logical_replication_slot("),
    ("archive --source {publisher} --publication p --directory {folder}/log --until {lsn}", 0, ""),
    ("adopt s", BY_ADMINISTRATOR, "Connect to the target as a superuser."),
    ("hand-back s", BY_ADMINISTRATOR, "Connect to the target as a superuser."),
    ("uninstall", BY_ADMINISTRATOR, 'Connect as role "postgres", or as a superuser.'),
    ("check s --fix --execute", BY_ADMINISTRATOR, "as the administrator of the server"),
]
# `run` is part of each test. The others have tests in test_recipe.py or in their own folders, or use no such role.
ELSEWHERE = {"run", "console", "lake", "migrate", "config", "demo", "prepare-spark"}


def test_the_list_has_each_command() -> None:
    names = {arguments.split()[0] for arguments, _, _ in COMMANDS}
    assert names | ELSEWHERE == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]
    assert not names & ELSEWHERE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_each_command_runs_with_the_roles_of_the_recipe(scene: Scene) -> None:
    await scene.streaming()
    values = {
        "publisher": scene.dsn_file(PUBLISHER, scene.source),
        "folder": str(scene.folder),
        "lsn": await scene.source.value("SELECT pg_current_wal_lsn()::text"),
    }
    for arguments, status, text in COMMANDS:
        first, *quoted = arguments.format(**values).split("'")
        done = await scene.as_recipe(*first.split(), *filter(None, quoted))
        said = done.stdout + done.stderr
        assert (done.returncode, text in said) == (status, True), f"{arguments}: {done.returncode}\n{said}"
    assert "permission denied" not in scene.program.text
    assert Path(scene.folder / "log").is_dir()
