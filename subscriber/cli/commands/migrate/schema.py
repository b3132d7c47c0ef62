"""`subscriber migrate schema`: copy roles and definitions to the target, before and after the initial copy of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber.cli.commands.migrate.options import NAME, DryRun, Jobs, Programs, Without
from subscriber.cli.dsn import Source, Target
from subscriber.cli.messages import print_message
from subscriber.display import printable, shell_word
from subscriber.errors import StatementError
from subscriber.formatting import count, in_bytes
from subscriber.remedy import Remedy
from subscriber.sql_text import sql_text
from subscriber.sqlstate import DUPLICATE_OBJECT

if TYPE_CHECKING:
    from subscriber.migration.schema.restore import RestoreProgress
    from subscriber.migration.schema.roles import LeftOut

LEFT_OUT = 1  # the exit status if the role may not create some objects


async def schema(
    source: Source,
    target: Target,
    after_copy: Annotated[
        bool, typer.Option("--after-copy", help="Create what the initial copy does not need, and analyze tables.")
    ] = False,
    programs: Programs = None,
    jobs: Jobs = 2,
    without: Without = None,
    large_objects: Annotated[
        bool, typer.Option("--large-objects", help="With --after-copy, also copy large objects.")
    ] = False,
    trusted_owner: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-owner", metavar="ROLE", help="Let code of this role have all rights of the target's role."
        ),
    ] = None,
    same_role: Annotated[
        list[str] | None,
        typer.Option(
            "--same-role", metavar="ROLE", help="This role of the target is the one of the source with its name."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> int:
    """Copy roles and definitions to the target with pg_dump. Subscriptions are left out.

    Before the initial copy: roles, tables and the rest of pre-data, primary keys and indexes of replica identities.
    With --after-copy: other indexes, constraints, triggers and so on. After a kill, the command continues.
    """
    if after_copy:
        if dry_run:
            raise typer.BadParameter("--dry-run is not possible with --after-copy; use diff --sql")
        return await _complete_definitions(
            source,
            target,
            programs=programs,
            jobs=jobs,
            without=without or [],
            large_objects=large_objects,
            trusted_owners=trusted_owner or [],
        )
    if large_objects:
        raise typer.BadParameter("--large-objects needs --after-copy")
    from subscriber.catalog.two_databases import open_both
    from subscriber.migration.schema.archive import dump_schema
    from subscriber.migration.schema.programs import find_programs
    from subscriber.migration.schema.restore import definitions_script, restore_definitions
    from subscriber.migration.schema.roles import create_roles, find_collisions, plan_roles

    same_roles = same_role or []
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
                is_new = await restore_definitions(archive, there, here, trusted_owners=trusted_owner or [])
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


async def _complete_definitions(
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
    from subscriber.catalog.two_databases import open_both
    from subscriber.migration.schema.archive import dump_schema
    from subscriber.migration.schema.large_objects import copy_large_objects
    from subscriber.migration.schema.programs import find_programs
    from subscriber.migration.schema.restore import restore_rest
    from subscriber.migration.schema.upkeep import analyze, refresh_materialized_views

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
    for grant in left_out:
        message = f"{grant.kind} {grant.object}: {grant.reason}"
        print_message("WARNING", message, hint=f"On the target: {sql_text(grant.statement)}")
