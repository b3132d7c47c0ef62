"""`start`: bring an empty target to the point where it follows the source, as steps that can be repeated.

    preflight     obstacles of the move, as far as they are not waived
    roles         roles of the source that the target lacks
    definitions   schemas, types and tables; keys that workers do not build
    subscribe     the publication on the source and the subscription on the target, whose fence is closed before
    copy          the initial copy of all tables; workers build the keys, indexes and foreign keys
    rest          triggers, and all indexes and foreign keys that the workers have not built
    views         materialized views
    analyze       statistics of the planner

Failure cases:

- Killed at any point: the next `start` repeats all steps, and each skips what exists.
- A table of the target exists before `definitions`: refused, unless all of them exist.
- A table cannot be copied, and a retry alone cannot help: `start` fails with the error of the table. The next `start`
  continues with the tables that are left.
- The copy takes long: `start` waits without a limit, and reports the tables that are left. It can be ended and
  repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio

from subscriber.apply.table_states import TableState
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.connection import Connection
from subscriber.catalog.grammar.options import FOR_CREATE, parse_options
from subscriber.catalog.grammar.parser import CreateSubscription, parse
from subscriber.catalog.store import migrations
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.two_databases import open_both
from subscriber.migration.plan import START, Phase, Side, Standing
from subscriber.migration.preflight.comparison import accepted_roles
from subscriber.migration.preflight.preflight import JOBS, run_preflight
from subscriber.migration.preflight.rules import PUBLICATION_EXISTS
from subscriber.migration.schema.archive import SchemaArchive, dump_schema
from subscriber.migration.schema.large_objects import copy_large_objects
from subscriber.migration.schema.programs import find_programs
from subscriber.migration.schema.restore import restore_definitions, restore_rest
from subscriber.migration.schema.roles import create_roles
from subscriber.migration.schema.upkeep import analyze, refresh_materialized_views
from subscriber.migration.server import MoveServer
from subscriber.migration.server_session import APPLICATION_NAME
from subscriber.migration.steps import Detail
from subscriber.migration.subscriptions import origin_option
from subscriber.quoting import identifier, literal, qualified
from subscriber.status.waits import built_wait

POLL = 0.5  # seconds
_CREATED = "created_roles"  # of the detail of a step
OTHER_TABLESPACES = "SELECT EXISTS (SELECT FROM pg_catalog.pg_tablespace t WHERE t.spcname NOT LIKE 'pg\\_%')"
IS_SUPERUSER = "SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user"
# The tables of FOR ALL TABLES. A table of an extension can only be published by its owner.
PERMANENT = """
SELECT c.oid::bigint AS relid, n.nspname::text AS schema, c.relname::text AS name
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384 AND n.nspname <> 'subscriber'
   AND (pg_catalog.pg_has_role(c.relowner, 'USAGE')
        OR NOT EXISTS (SELECT FROM pg_catalog.pg_depend x
                        WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND x.objid = c.oid
                          AND x.deptype = 'e')) ORDER BY 2, 3
"""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of `start`.

    Attributes:
        publication: the publication on the source. Created for all tables if it does not exist; by a role that is no
            superuser, for the tables that exist now. None: the move's name.
        source_conninfo: the connection string by which the target's worker reaches the source. None: the command's.
        waive: names of findings of the preflight to accept.
        schema: copy definitions. False: the target has them.
        large_objects: copy large objects.
        programs: the directory of pg_dump and pg_restore. None: they are searched for.
        jobs: tables that the launcher of this process copies, and indexes that it builds, at the same time. Also the
            sessions that build the indexes which workers have left, and that analyze tables.
        with_options: further options of CREATE SUBSCRIPTION, as in WITH (…).
    """

    publication: str | None = None
    source_conninfo: str | None = field(default=None, repr=False)
    waive: Sequence[str] = ()
    schema: bool = True
    large_objects: bool = False
    programs: Path | None = None
    jobs: int = JOBS
    with_options: str = ""


async def unfinished_step(target: MoveServer) -> str | None:
    """Return the step with which `start` has to continue. None: it was never called, or has done all steps."""
    async with target.use() as connection:
        records = await migrations.load_steps(connection, target.migration)
    began = [record for record in records if record.command == "start"]
    done = {record.step for record in began if record.ended is not None and record.error is None}
    left = [step.name for step in START if step.name not in done]
    return left[0] if began and left else None


def _trusted_owners(with_options: str) -> Sequence[str]:
    """Return the roles that the options of the subscription trust."""
    if not with_options:
        return ()
    (statement,) = parse(f"CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p WITH ({with_options})")
    assert isinstance(statement, CreateSubscription)
    return parse_options(statement.options, FOR_CREATE).trusted_owners


class StartSteps:
    """The steps of `start`, one method for each step of plan.START."""

    def __init__(
        self, name: str, source: MoveServer, target: MoveServer, options: StartOptions, on_left: Callable[[int], None]
    ) -> None:
        """Create the steps.

        Args:
            name: the subscription on the target.
            source: the server with the database.
            target: the server that it moves to.
            options: of the command.
            on_left: called with the number of tables whose copy has not ended, whenever it changes.
        """
        self._name = name
        self._source, self._target = source, target
        self._options = options
        self._on_left = on_left

    async def _is_subscribed(self) -> bool:
        async with self._target.use() as connection:
            return await find_subscription(connection, self._name) is not None

    async def preflight(self) -> Detail:
        options = self._options
        preflight = await run_preflight(
            self._source.dsn,
            self._target.dsn,
            schema=options.schema and not await self._is_subscribed(),
            large_objects=options.large_objects,
            programs=options.programs,
            slots=(self._name, f"{self._name}_back"),
            names=options.waive,
            own_roles=await self._own_roles(),
            jobs=options.jobs,
            publication=options.publication or self._name,
        )
        preflight.require()
        return {
            "findings": [finding.name for finding in preflight.findings],
            "waived": [finding.name for finding in preflight.waived],
        }

    async def roles(self) -> Detail:
        if not self._options.schema:
            return {}
        own = {*await self._own_roles(), *accepted_roles(self._options.waive)}
        async with self._sessions() as (source, target), target.transaction():
            plan = await create_roles(source, target, own)
            if plan.created:  # a later call knows by this record which roles are its own
                record: Detail = {_CREATED: list(plan.created)}
                await migrations.add_step(target, self._target.migration, "start", "roles", (0.0, 0.0), None, record)
        return {"roles": len(plan.statements), "left_out": len(plan.left_out)}

    async def _own_roles(self) -> set[str]:
        """Return the roles of the target that this move has made."""
        async with self._target.use() as connection:
            steps = await migrations.load_steps(connection, self._target.migration)
        return {role for step in steps for role in step.detail.get(_CREATED, ())}

    async def definitions(self) -> Detail:
        if not self._options.schema or await self._is_subscribed():
            return {}
        async with self._sessions() as (source, target), self._archive() as archive:
            defer = await self._workers_build()
            trusted = _trusted_owners(self._options.with_options)
            is_new = await restore_definitions(archive, source, target, defer_keys=defer, trusted_owners=trusted)
            return {"created": is_new}

    async def subscribe(self) -> Detail:
        standing = Standing(Side.SOURCE, Phase.FOLLOWING)
        closed = await self._target.close_fence(standing)
        if await self._source.load() is not None:  # of a move that has ended on the source
            await self._source.save(standing)
        if not await self._is_subscribed():
            publication = self._options.publication or self._name
            async with self._source.use() as connection:
                exists = await connection.fetchval(PUBLICATION_EXISTS, publication)
            if not exists:
                statement = await self._publication_statement(publication)
                await self._source.create_publication(publication, statement, standing)
            options = f"origin = {origin_option(self._source)}"
            if self._options.with_options:
                options += f", {self._options.with_options}"
            if await self._workers_build():
                options += ", copy_indexes = after"
            head = f"CREATE SUBSCRIPTION {identifier(self._name)} CONNECTION "
            tail = f" PUBLICATION {identifier(publication)} WITH ({options})"
            conninfo = literal(self._options.source_conninfo or self._source.dsn)

            async def create() -> None:
                async with self._target.use() as connection:
                    await execute(connection, head + conninfo + tail, notice=lambda *_: None)

            await self._target.perform(f"{head}'…'{tail}", create)
        relids = await self._relids()
        await self._target.create_fence(relids)
        await self._target.wait_until_quiet(closed)
        return {"tables": len(relids)}

    async def _publication_statement(self, publication: str) -> str:
        """Return the statement that publishes all tables. FOR ALL TABLES needs a superuser."""
        create = f"CREATE PUBLICATION {identifier(publication)}"
        async with self._source.use() as connection:
            if await connection.fetchval(IS_SUPERUSER):
                return f"{create} FOR ALL TABLES"
            tables = [qualified(row["schema"], row["name"]) for row in await connection.fetch(PERMANENT)]
        return f"{create} FOR TABLE {', '.join(tables)}" if tables else create

    async def _relids(self) -> list[int]:
        """Return the tables of the subscription."""
        subscription = await self._target.subscription(self._name)
        async with self._target.use() as connection:
            return [relation.relid for relation in await load_relation_states(connection, subscription.oid)]

    async def _workers_build(self) -> bool:
        """Return True if the workers that copy tables are to build keys and indexes as the source has them.

        A worker builds those of a table before the table catches up, while others are copied. It chooses no
        tablespace, so step `rest` builds all indexes of a source with tablespaces.
        """
        if not self._options.schema or "copy_indexes" in self._options.with_options:
            return False
        async with self._source.use() as connection:
            return not await connection.fetchval(OTHER_TABLESPACES)

    async def copy(self) -> Detail:
        subscription = await self._target.subscription(self._name)
        left: int | None = None
        # The workers add foreign keys, too. Step `rest` would add those at the same time.
        wait = built_wait(self._name)
        while left != 0:
            async with self._target.use() as connection:
                await wait.is_over(connection)  # raises the error of a table
                relations = await load_relation_states(connection, subscription.oid)
                relations = [
                    listed for listed in relations if listed.state is not TableState.READY or listed.lacks_foreign_keys
                ]
            if left != len(relations):
                left = len(relations)
                self._on_left(left)
            if any(relation.state is TableState.SYNCDONE for relation in relations):
                await self._source.mark()  # the hand-over of a table ends at a later position
            await anyio.sleep(POLL if left else 0)
        return {}

    async def rest(self) -> Detail:
        if not self._options.schema:
            return {}
        trusted = (await self._target.subscription(self._name)).trusted_owners
        async with self._sessions() as (source, _), self._archive() as archive:
            own = await self._source.created_publications()
            restored = await restore_rest(
                archive, source, self._target.dsn, jobs=self._options.jobs, without=own, trusted_owners=trusted
            )
        return {"created": restored.done, "left_out": [asdict(left) for left in restored.left_out]}

    async def views(self) -> Detail:
        async with self._sessions() as (source, target):
            return {"refreshed": await refresh_materialized_views(source, target)}

    async def analyze(self) -> Detail:
        return {"tables": await analyze(self._target.dsn, jobs=self._options.jobs)}

    async def large_objects(self) -> Detail:
        if not self._options.large_objects:
            return {}
        async with self._sessions() as (source, target):
            return asdict(await copy_large_objects(source, target))

    @asynccontextmanager
    async def _sessions(self) -> AsyncIterator[tuple[Connection, Connection]]:
        """Open a session on each server, whose settings the steps may change."""
        async with open_both(self._source.dsn, self._target.dsn, APPLICATION_NAME) as both:
            yield both

    @asynccontextmanager
    async def _archive(self) -> AsyncIterator[SchemaArchive]:
        """Read the definitions of the source."""
        versions = self._source.version // 10000, self._target.version // 10000
        async with dump_schema(self._source.dsn, await find_programs(*versions, self._options.programs)) as archive:
            yield archive
