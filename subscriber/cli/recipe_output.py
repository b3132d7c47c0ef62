r"""`subscriber check --fix`: print the recipe as scripts for psql. With `--execute`, run the target's part.

**Purpose.** A script consists of SQL, of `\! subscriber exec …` for statements about subscriptions, and of `\password
ROLE`, with which psql prompts for a password and sends its verifier.

**Invariants.** The server gets only the verifier of a password. The password itself appears in exactly one place: in a
connection string that you asked for, in a file of mode 0600, or once on stdout. A file is written before the server
gets the password.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from subscriber.catalog.commands.execute import execute
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.check.recipe import PublisherRoles, Recipe, RecipeSide, RecipeStep, TargetRoles
from subscriber.cli.environment import APPLY_VARIABLE, TARGET_VARIABLE
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.scram import new_password, scram_verifier
from subscriber.display import json_text, printable, shell_word, sql_identifier, sql_literal
from subscriber.errors import StatementError
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, IO_ERROR

# Options of a connection string, besides the user, that identify the client.
OF_A_PERSON = ("sslcert", "sslkey", "sslpassword", "passfile")


def script(recipe: Recipe, side: RecipeSide) -> str:
    """Return one server's part of the recipe as a script for psql. Empty if the recipe has no part for that server."""
    server = recipe.target if side is RecipeSide.TARGET else recipe.publisher
    return "" if server is None else "\n".join(_lines(recipe, side, server)) + "\n"


def _lines(recipe: Recipe, side: RecipeSide, server: TargetRoles | PublisherRoles) -> Iterator[str]:
    where = f'the {side}, PostgreSQL {server.version_text}, database "{server.database}"'
    yield f"-- Least privilege for subscriber: {printable(where)}."
    who = "a superuser"
    if isinstance(server, TargetRoles) and not server.schema_by_superuser:
        who = "the owner of schema subscriber, who may create roles and grant those of the tables' owners"
    yield f"-- Run this there as {printable(who)}:"
    yield "-- psql -v ON_ERROR_STOP=1 -f FILE"
    if any(step.exec is not None for step in recipe.steps if step.side is side):
        yield f"-- {TARGET_VARIABLE} names the same database and role for lines with subscriber exec."
    for number, step in enumerate((step for step in recipe.steps if step.side is side), 1):
        yield from ("", f"-- {number}. {printable(step.what)}", f"-- Without it: {printable(step.without)}.")
        yield from _parts(step)
    notes = [note for where, note in recipe.notes if where is side]
    if notes:
        yield from ("", "-- Not done by these statements:", *(f"-- * {printable(note)}" for note in notes))


def _parts(step: RecipeStep) -> Iterator[str]:
    if step.exec is not None:
        yield f"\\! subscriber exec {shell_word(step.exec)}"
    yield from step.statements
    if step.password_of is not None:
        yield f"\\password {sql_identifier(step.password_of)}"


def print_recipe(recipe: Recipe, *, json: bool) -> None:
    """Print both parts, the target's before the publisher's."""
    if json:
        notes = [{"side": side, "text": text} for side, text in recipe.notes]
        print(json_text({"steps": [asdict(step) for step in recipe.steps], "notes": notes}))
    else:
        print("\n".join(filter(None, (script(recipe, side) for side in RecipeSide))), end="")


# --- executing ------------------------------------------------------------------------------------


async def execute_recipe(recipe: Recipe, target_dsn: str, credentials: Path | None) -> None:
    """Run the target's part as the superuser of `target_dsn`, and write connection strings for new roles.

    Args:
        credentials: a directory for the files `launcher` and `apply`. None: the connection strings are printed on
            stdout.

    Raises:
        StatementError: the role is not a superuser, or a file already exists.
        ServerError: a statement failed. No role has been changed then.
    """
    facts = recipe.target
    assert facts is not None
    passwords = {role: new_password() for role in (facts.launcher, facts.apply) if role not in facts.roles}
    strings = {
        name: connection_string(target_dsn, facts.database, role, passwords[role])
        for name, role in (("launcher", facts.launcher), ("apply", facts.apply))
        if role in passwords
    }
    written = [] if credentials is None else write_credentials(credentials, strings)
    try:
        await _execute_steps(recipe, target_dsn, passwords)
    except BaseException:
        for file in written:
            file.unlink()
        raise
    for file in written:
        print(f"wrote {printable(str(file))}", file=sys.stderr)
    for role in sorted({facts.launcher, facts.apply} - passwords.keys()):
        print(f'role "{printable(role)}" keeps its password', file=sys.stderr)
    if credentials is None:
        for name, variable in (("launcher", TARGET_VARIABLE), ("apply", APPLY_VARIABLE)):
            if name in strings:
                print(f"{variable}={shlex.quote(strings[name])}")


async def _execute_steps(recipe: Recipe, target_dsn: str, passwords: Mapping[str, str]) -> None:
    async with CatalogConnection.open(target_dsn, "subscriber check") as catalog, catalog.use() as connection:
        if not await connection.fetchval("SELECT pg_catalog.current_setting('is_superuser')::bool"):
            raise StatementError(
                "permission denied to execute the recipe",
                detail="Only superusers may do so.",
                hint="Leave out --execute, and run the printed statements as the administrator of the server.",
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
        await ensure_schema(connection)
        async with connection.transaction():
            for step in recipe.steps:
                if step.side is not RecipeSide.TARGET:
                    continue
                if step.exec:
                    await execute(connection, step.exec, notice=lambda *_: None)
                for statement in step.statements:
                    await connection.execute(statement)
                if (password := passwords.get(step.password_of or "")) is not None:
                    role = sql_identifier(step.password_of or "")
                    await connection.execute(f"ALTER ROLE {role} PASSWORD {sql_literal(scram_verifier(password))}")


def connection_string(dsn: str, database: str, role: str, password: str) -> str:
    """Return `dsn` changed for another role."""
    given = Conninfo.parse(dsn)
    kept = {keyword: value for keyword, value in given.parameters.items() if keyword not in OF_A_PERSON}
    return str(Conninfo(kept).with_(dbname=database, user=role, password=password))


def write_credentials(directory: Path, strings: Mapping[str, str]) -> list[Path]:
    """Write each string to a file of that name that only this user can read. Returns the files.

    Raises:
        StatementError: a file already exists, or cannot be written. Files written before the error are removed.
    """
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in strings.items():
            file = directory / name
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(file)
            with os.fdopen(descriptor, "w") as opened:
                opened.write(f"{text}\n")
                opened.flush()
                os.fsync(descriptor)
    except OSError as error:
        for file in written:
            with suppress(OSError):
                file.unlink()
        raise StatementError(
            f'could not write connection strings to directory "{directory}": {error.strerror}',
            hint="Name another directory: --credentials DIRECTORY",
            sqlstate=IO_ERROR,
        ) from None
    return written
