"""SchemaRecorder: reads the publisher's catalog when the publisher describes a table, for the log's schema history.

The rules, and why they are needed, are in changelog/schema_history.py. The query runs while the stream waits. It is one
transaction for each description, which the publisher sends once in a session and after each change of the table.

Failure cases.

- Table renamed or dropped since, or the query refused: the version is stored without the catalog.
- Connection lost, or no answer within TIMEOUT: describe() raises, and the archiver starts its session again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio

from subscriber import telemetry
from subscriber.changelog.schema_history import (
    SchemaHistory,
    TableVersion,
    described_version,
    is_repeated,
    is_same,
)
from subscriber.display import sql_name
from subscriber.errors import ConnectionLost, ProtocolError, ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_table_version

TIMEOUT = 60.0  # seconds for the queries about one table


class SchemaRecorder:
    """Collects new versions of tables for one session of the archiver. Call close() at the end."""

    def __init__(self, source: str, name: str, publications: Sequence[str], history: SchemaHistory) -> None:
        """Create a recorder.

        Args:
            source: the connection string of the publisher.
            name: the name of the connection.
            publications: the names of publications.
            history: the versions that the log has.
        """
        self._source = source
        self._name = name
        self._publications = publications
        self._last = {relid: history.of(relid)[-1] for relid in history.relids()}
        # Versions that differ from the last one in nothing that readers need. They are stored before the next
        # version, which would otherwise seem to have changed more.
        self._unneeded: dict[int, TableVersion] = {}
        self._new: list[TableVersion] = []
        self._publisher: Publisher | None = None

    def take(self) -> list[TableVersion]:
        """Return the new versions, which must be stored before the changes that follow them."""
        new, self._new = self._new, []
        return new

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
        """
        last = self._unneeded.get(relation.relid, self._last.get(relation.relid))
        try:
            with anyio.fail_after(TIMEOUT):
                version = await self._ask(relation, position)
        except TimeoutError:
            raise ConnectionLost(f"the publisher did not answer within {TIMEOUT:.0f} s") from None
        if version.relation() != relation:  # the catalog is that of a later time
            version = described_version(relation, position, version)
            if last is not None and last.is_known and is_repeated(last, version):
                return
        is_equal = last is not None and version == replace(last, position=version.position, asked=version.asked)
        if not is_equal or not version.is_known:
            self._add(version)

    def _add(self, version: TableVersion) -> None:
        recorded, unneeded = self._last.get(version.relid), self._unneeded.pop(version.relid, None)
        if recorded is not None and is_same(recorded, version):
            self._unneeded[version.relid] = version
            return
        if unneeded is not None:
            self._new.append(unneeded)
            self._last[version.relid] = unneeded
            if is_same(unneeded, version):
                self._unneeded[version.relid] = version
                return
        self._new.append(version)
        self._last[version.relid] = version
        if recorded is not None:
            telemetry.log(
                telemetry.LOG,
                f"table {sql_name(version.schema, version.name)} has changed at {version.position}",
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
