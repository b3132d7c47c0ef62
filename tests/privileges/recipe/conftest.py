"""Servers whose roles of the recipe need their passwords. An unavailable version is skipped, with the reason."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.demo.servers import Server, Servers
from tests.matrix.programs import NotAvailable, programs
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Program
from tests.privileges.recipe.scene import ADMIN, APPLY, LAUNCHER, ON_PUBLISHER, ON_TARGET, OWNER, PUBLISHER, Scene

_started: dict[int, Server] = {}


def server(portal: BlockingPortal, servers: Servers, side: str, major: int) -> Server:
    """Return the session's server of that side and major version. Skips the test if its programs are unavailable."""
    key = major if side == "publisher" else -major
    if key in _started:
        return _started[key]
    try:
        bin = programs(major)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL {major}: {reason}")

    async def start() -> Server:
        created = await servers.create(f"{side} of {major} for the recipe", SETTINGS, bin=bin)
        hba = created.data / "pg_hba.conf"
        roles = ",".join((LAUNCHER, APPLY, PUBLISHER))
        hba.write_text(f"host all {roles} 127.0.0.1/32 md5\n{hba.read_text()}")  # also SCRAM, if that is stored
        await created.start()
        return created

    _started[key] = portal.call(start)
    return _started[key]


@pytest.fixture
def majors(request: pytest.FixtureRequest) -> tuple[int, int]:
    both: tuple[int, int] = request.param
    return both


@pytest.fixture
def publisher(majors: tuple[int, int], portal: BlockingPortal, session_servers: Servers) -> Server:
    return server(portal, session_servers, "publisher", majors[0])


@pytest.fixture
def target(majors: tuple[int, int], portal: BlockingPortal, session_servers: Servers) -> Server:
    return server(portal, session_servers, "target", majors[1])


@pytest.fixture
async def scene(
    source_db: Database, target_db: Database, majors: tuple[int, int], tmp_path: Path, processes: Path
) -> AsyncIterator[Scene]:
    wrapper = tmp_path / "subscriber"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m subscriber "$@"\n')
    wrapper.chmod(0o755)
    log = processes / "run.log"
    scene = Scene(source_db, target_db, majors, tmp_path, Program("", log))
    options = ["--apply-target", scene.dsn_file(APPLY, target_db)]
    scene.program = Program(scene.dsn_file(LAUNCHER, target_db), log, options=options)
    try:
        await source_db.execute(*ON_PUBLISHER)
        await target_db.execute(*ON_TARGET)
        yield scene
    finally:
        scene.program.kill()
        owner = await target_db.value("SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'subscriber'")
        if owner is not None:
            await scene.subscriber("exec", "--target", target_db.dsn(user=owner), "DROP SUBSCRIPTION IF EXISTS s")
        for database, roles in ((target_db, (LAUNCHER, APPLY, ADMIN, OWNER)), (source_db, (PUBLISHER,))):
            for role in roles:
                if await database.value("SELECT true FROM pg_roles WHERE rolname = $1", role):
                    await database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")
