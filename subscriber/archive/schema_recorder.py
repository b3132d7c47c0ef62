"""SchemaRecorder: reads the publisher's catalog when the publisher describes a table, for the log's schema history.

The rules, and why they are needed, are in changelog/schema_history.py. The query runs while the stream waits. It is one
transaction for each description, which the publisher sends once in a session and after each change of the table.

Failure cases.

- Table renamed or dropped since, or the query refused: the version is stored without the catalog.
- Composite type altered, which the publisher does not report: check_types() reads the types of all described tables
  before changes are stored, and returns further versions. Logs of tables without composite types need no query.
- Composite type altered by a transaction that is written, but not visible to queries yet: the publisher needs a lock of
  the type to print values by a new definition, which it gets when the transaction is visible.
- Connection lost, or no answer within TIMEOUT: describe() raises, and the archiver starts its session again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import anyio

from subscriber import telemetry
from subscriber.changelog.schema_history import (
    LoggedType,
    SchemaHistory,
    TableVersion,
    change_of,
    described_version,
    is_repeated,
    is_same,
)
from subscriber.display import sql_name
from subscriber.errors import ConnectionLost, ProtocolError, ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.protocol.relation_sizes import RelationSizes
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_table_version, read_types, types_of

TIMEOUT = 60.0  # seconds for the queries about one table


class SchemaRecorder:
    """Collects new versions of tables for one session of the archiver. Call close() at the end."""

    def __init__(
        self,
        source: str,
        name: str,
        publications: Sequence[str],
        history: SchemaHistory,
        relation_limit: int | None = None,
    ) -> None:
        """Create a recorder.

        Args:
            source: the connection string of the publisher.
            name: the name of the connection.
            publications: the names of publications.
            history: the versions that the log has.
            relation_limit: bytes of memory for descriptions of tables. None: there is no limit.
        """
        self._sizes = RelationSizes(relation_limit)
        self._source = source
        self._name = name
        self._publications = publications
        self._last = {relid: history.of(relid)[-1] for relid in history.relids()}
        # Versions that differ from the last one in nothing that readers need. They are stored before the next
        # version, which would otherwise seem to have changed more.
        self._unneeded: dict[int, TableVersion] = {}
        self._new: list[TableVersion] = []
        # The versions of the tables that the publisher has described, for the changes that have been stored.
        self._described: dict[int, TableVersion] = {}
        self._asking = anyio.Lock()
        self._publisher: Publisher | None = None

    def take(self) -> list[TableVersion]:
        """Return the new versions. Call check_types() with them before the changes that follow them are stored."""
        new, self._new = self._new, []
        return new

    async def check_types(self, new: list[TableVersion], before: Lsn) -> list[TableVersion]:
        """Return the versions to store before changes: `new`, and further ones if a composite type was altered.

        Args:
            new: the result of the last take(), when the changes were taken.
            before: the end of the changes that have been stored.

        Raises:
            ServerError: the publisher refuses a query.
            ConnectionLost: the publisher cannot be reached.
        """
        earlier = [version for version in self._described.values() if version.types]
        if earlier or any(version.types for version in new):
            async with self._asking:
                with self._limit():
                    types = await read_types(await self._connected(), [*earlier, *new])
            altered = [(version, types_of(version, types)) for version in earlier]
            further = [
                replace(version, types=kinds, position=max(before, version.position))
                for version, kinds in altered
                if kinds != version.types
            ]
            new = [*further, *(self._with_types(version, types_of(version, types)) for version in new)]
            for version in further:
                self._replace_last(self._described[version.relid], version)
        self._described |= {version.relid: version for version in new}
        return new

    def _with_types(self, version: TableVersion, types: tuple[LoggedType, ...]) -> TableVersion:
        typed = version if types == version.types else replace(version, types=types)
        self._replace_last(version, typed)
        return typed

    def _replace_last(self, version: TableVersion, by: TableVersion) -> None:
        """Compare later descriptions with `by`, unless there have been some since `version`."""
        if self._last.get(version.relid) is version:
            self._last[version.relid] = by
            if (unneeded := self._unneeded.get(version.relid)) is not None:
                self._unneeded[version.relid] = replace(unneeded, types=by.types, position=by.position)

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        try:
            with anyio.fail_after(TIMEOUT):
                yield
        except TimeoutError:
            raise ConnectionLost(f"the publisher did not answer within {TIMEOUT:.0f} s") from None

    def close(self) -> None:
        """Close the connection."""
        if self._publisher is not None:
            self._publisher.session.abort()
            self._publisher = None

    async def describe(self, relation: Relation, position: Lsn) -> None:
        """Process a description by the publisher.

        Args:
            relation: the description.
            position: the position of the transaction in which it came.

        Raises:
            ServerError: the publisher refuses the connection.
            ConnectionLost: the publisher cannot be reached.
            ProtocolError: the descriptions exceed the limit.
        """
        self._sizes.add(relation)
        if relation.relid in self._last:
            self._described.setdefault(relation.relid, self._last[relation.relid])
        last = self._unneeded.get(relation.relid, self._last.get(relation.relid))
        async with self._asking:
            with self._limit():
                version = await self._ask(relation, position)
        if version.relation() != relation:  # the catalog is that of a later time
            version = described_version(relation, position, version)
            if last is not None and last.is_known and is_repeated(last, version):
                return
        is_equal = last is not None and version == replace(last, position=version.position, asked=version.asked)
        if not is_equal or not version.is_known:
            self._add(version)

    def _add(self, version: TableVersion) -> None:
        recorded, unneeded = self._last.get(version.relid), self._unneeded.pop(version.relid, None)
        if recorded is not None and is_same(recorded, version) and recorded.types == version.types:
            self._unneeded[version.relid] = version
            return
        if unneeded is not None:
            self._new.append(unneeded)
            self._last[version.relid] = unneeded
            if is_same(unneeded, version) and unneeded.types == version.types:
                self._unneeded[version.relid] = version
                return
        self._new.append(version)
        self._last[version.relid] = version
        if recorded is not None:
            telemetry.log(
                telemetry.LOG,
                f"table {sql_name(version.schema, version.name)} has changed at {version.position}",
                detail=change_of(recorded, version),
                event="archive.table_changed",
            )

    async def _ask(self, relation: Relation, position: Lsn) -> TableVersion:
        publisher = await self._connected()
        await publisher.begin_snapshot()
        try:
            version = await read_table_version(publisher, relation, self._publications, position)
        except (ProtocolError, ServerError) as error:  # the table may have been dropped since
            telemetry.log_error(error, telemetry.LOG)
            version = described_version(relation, position)
        await publisher.session.rows("ROLLBACK")
        return version

    async def _connected(self) -> Publisher:
        if self._publisher is None:
            self._publisher = await Publisher.connect(self._source, application_name=self._name, timezone="UTC")
            await self._publisher.session.rows("SELECT pg_catalog.set_config('bytea_output', 'hex', false)")
        return self._publisher
