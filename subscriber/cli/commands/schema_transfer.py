"""`subscriber migrate schema`: copy roles and definitions to the target, before and after the initial copy of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from subscriber.catalog.two_databases import open_both
from subscriber.cli.commands.exec import print_message
from subscriber.display import printable, shell_word
from subscriber.errors import StatementError
from subscriber.formatting import count, in_bytes
from subscriber.migration.schema.archive import dump_schema
from subscriber.migration.schema.large_objects import copy_large_objects
from subscriber.migration.schema.programs import find_programs
from subscriber.migration.schema.restore import (
    RestoreProgress,
    definitions_script,
    restore_definitions,
    restore_rest,
)
from subscriber.migration.schema.roles import LeftOut, create_roles, find_collisions, plan_roles
from subscriber.migration.schema.upkeep import analyze, refresh_materialized_views
from subscriber.remedy import Remedy
from subscriber.sql_text import sql_text
from subscriber.sqlstate import DUPLICATE_OBJECT

NAME = "subscriber migrate"
LEFT_OUT = 1  # the exit status if the role may not create some objects


async def copy_definitions(
    source: str,
    target: str,
    *,
    programs: Path | None,
    dry_run: bool,
    trusted_owners: Sequence[str],
    same_roles: Sequence[str],
) -> int:
    """Create roles and definitions on the target, as rows need them. Returns the exit status.

    Args:
        programs: the directory of pg_dump. None: find_programs() chooses.
        dry_run: print the statements only.
        trusted_owners: roles whose code may have all rights of the target's role.
        same_roles: roles of the target that are those of the source with their names.
    """
    async with open_both(source, target, NAME) as (there, here):
        majors = [side.get_server_version().major for side in (there, here)]
        _check_roles(await find_collisions(there, here, same_roles))
        async with dump_schema(source, await find_programs(majors[0], majors[1], programs)) as archive:
            if dry_run:
                plan = await plan_roles(there, here, same_roles)
                _print_left_out(plan.left_out)
                for statement in plan.statements:
                    print(f"{sql_text(statement.shown)};")
                print(sql_text(await definitions_script(archive, there, here)))
                return 0
            async with here.transaction():  # a repeated call makes no difference between roles
                plan = await create_roles(there, here, same_roles)
                is_new = await restore_definitions(archive, there, here, trusted_owners=trusted_owners)
            _print_left_out(plan.left_out)
            print(count(len(plan.statements), "statement"), "for roles and the database")
            relations = count(len(archive.pre_data), "object")
            print(f"{relations} created" if is_new else "the target has the definitions already")
    return 0


def _check_roles(collisions: Sequence[str]) -> None:
    """Check that no role of the target gets objects or privileges of another person. Raises StatementError."""
    if not collisions:
        return
    names = ", ".join(f'"{name}"' for name in collisions)
    options = " ".join(f"--same-role {shell_word(name)}" for name in collisions)
    raise StatementError(
        f"the target has had roles with names of the source: {names}",
        detail="They would own objects, or have privileges, that roles of the source have.",
        hint=Remedy(
            "rename them on the target, or, if they are the same persons, repeat the command with the options",
            options,
        ),
        sqlstate=DUPLICATE_OBJECT,
    )


async def complete_definitions(
    source: str,
    target: str,
    *,
    programs: Path | None,
    jobs: int,
    without: Sequence[str],
    large_objects: bool,
    trusted_owners: Sequence[str],
) -> int:
    """Create the other objects after the copy of rows, and fill materialized views. Returns the exit status.

    An object that the role may not create is a warning, with the statement for an administrator.

    Args:
        programs: the directory of pg_dump. None: find_programs() chooses.
        jobs: sessions that build indexes.
        without: publications that are not created.
        large_objects: copy them, too.
        trusted_owners: roles whose code may have all rights of the target's role.
    """

    async def progress(found: RestoreProgress) -> None:
        print(printable(f"{found.done}/{found.total} {found.about}"), flush=True)

    async with open_both(source, target, NAME) as (there, here):
        majors = [side.get_server_version().major for side in (there, here)]
        async with dump_schema(source, await find_programs(majors[0], majors[1], programs)) as archive:
            restored = await restore_rest(
                archive, there, target, jobs=jobs, without=without, trusted_owners=trusted_owners, progress=progress
            )
        _print_left_out(restored.left_out)
        views = await refresh_materialized_views(there, here)
        if views:
            print(printable(f"refreshed {', '.join(views)}"))
        print(f"{count(await analyze(target, jobs=jobs), 'table')} analyzed")
        if large_objects:
            copied = await copy_large_objects(there, here)
            print(f"{copied.copied} of {count(copied.total, 'large object')} copied, {in_bytes(copied.bytes)}")
    return LEFT_OUT if restored.left_out else 0


def _print_left_out(left_out: Sequence[LeftOut]) -> None:
    for found in left_out:
        message = f"{found.kind} {found.object}: {found.reason}"
        print_message("WARNING", message, None, f"On the target: {sql_text(found.statement)}", sys.stderr)
