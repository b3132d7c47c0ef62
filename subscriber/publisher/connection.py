"""What CREATE SUBSCRIPTION and table synchronization ask of a publisher.

Everything runs on one walsender session, where only simple queries work; a snapshot that a slot's
creation makes (`use`) and the queries and COPY that need it are on the same session that way.

A server's error keeps its SQLSTATE, DETAIL and HINT and gets the words in front that PostgreSQL's own
subscriber puts there: `could not create replication slot "s": ERROR:  …`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from subscriber import server_features as features
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.session import Session
from subscriber.display import sql_name
from subscriber.errors import PublisherError, ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import is_text
from subscriber.protocol.messages import ReplicaIdentity
from subscriber.publisher import commands, sequences, tables
from subscriber.publisher.answers import count, modifier, oid, parsing, signed
from subscriber.publisher.own_schema import IS_OURS, OWN_SCHEMA, OWN_SEQUENCES
from subscriber.publisher.sequences import SequenceDefinition, SequenceValue
from subscriber.publisher.tables import PublishedColumn, PublishedTable
from subscriber.quoting import literal, literals
from subscriber.sqlstate import (
    CHARACTER_NOT_IN_REPERTOIRE,
    FEATURE_NOT_SUPPORTED,
    INSUFFICIENT_PRIVILEGE,
    SERIALIZATION_FAILURE,
    UNDEFINED_OBJECT,
)

# Values must not depend on what the publisher's role or database has set.
SETTINGS = {"datestyle": "ISO", "intervalstyle": "postgres", "extra_float_digits": "3"}

# The detail and the hint of an error of SnapBuildInitialSnapshot() in snapbuild.c.
_TOO_MANY_UNFINISHED = (
    "The snapshot of a new slot lists each transaction and subtransaction that has not committed. The publisher has"
    " more of them than it can list at the moment, for example because a transaction has hundreds of savepoints.",
    "A retry succeeds when these transactions have ended. Find them in pg_stat_activity of the publisher.",
)


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """The answer to IDENTIFY_SYSTEM."""

    systemid: int  # of the cluster; survives a failover and a restart, not an initdb
    timeline: int
    position: Lsn  # everything before it is flushed (on a standby: replayed)
    dbname: str
    in_recovery: bool  # a standby


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    name: str
    consistent_point: Lsn
    snapshot_name: str | None  # None unless the snapshot is exported


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A row of the publisher's pg_replication_slots; what its version does not have is None or False."""

    name: str
    plugin: str | None  # None: a physical slot
    database: str | None
    in_this_database: bool  # the one that was connected to
    temporary: bool
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush: Lsn | None
    wal_status: str | None  # reserved, extended, unreserved, lost; None when it reserves nothing
    safe_wal_size: int | None  # bytes until it may be lost; None without a limit
    two_phase: bool
    conflicting: bool
    invalidation_reason: str | None  # rows_removed, wal_removed, wal_level_insufficient, idle_timeout
    failover: bool
    synced: bool  # copied from a primary; still set after the standby's promotion

    @property
    def is_lost(self) -> bool:
        """True if the slot can never be read again."""
        return self.wal_status == "lost" or self.conflicting or self.invalidation_reason is not None


class Publisher:
    """A walsender session for one database of the publisher. Two tasks must not use it concurrently.

    An `async with` block drops the connection at its end.
    """

    def __init__(self, session: Session, *, is_named: bool = False) -> None:
        """`is_named`: the connection string says what the session is called."""
        self.session = session
        self._is_named = is_named
        self._restricts = False  # restrict_views() was called
        self._admits = False  # the session may read foreign tables although it is restricted

    @classmethod
    async def connect(
        cls,
        conninfo: Conninfo | str,
        *,
        application_name: str,
        client_encoding: str | None = None,
        timezone: str | None = None,
        must_use_password: bool = False,
        timeout: float | None = None,
    ) -> Publisher:
        """Connect with the settings PostgreSQL's own subscriber uses, and an empty search_path.

        Args:
            conninfo: connection string of the publisher, or its parsed form.
            application_name: a fallback; the connection string's own takes precedence.
            client_encoding: encoding of the rows: that of the target's database, if rows are written to one. None:
                UTF8; texts of a database in SQL_ASCII are not converted.
            timezone: time zone of times in text. None: the publisher's own, as for PostgreSQL's subscriber.
            must_use_password: set for subscriptions whose owner is not a superuser. The connection string must have
                a password, and the server must request it.
            timeout: limit of each attempt, in seconds. None: the limits of connect().

        Raises:
            ConninfoError: the connection string is invalid.
            ConnectionLost: no host could be reached.
            ServerError: a server refused the session.
            PublisherError: a password is required.
        """
        if isinstance(conninfo, str):
            conninfo = Conninfo.parse(conninfo)
        conninfo = await conninfo.renewed()
        is_named = bool(conninfo.get("application_name"))
        if not is_named:  # PGAPPNAME names the program that started this one, not this subscriber
            conninfo = conninfo.with_(application_name=application_name)
        settings = SETTINGS if client_encoding is None else {**SETTINGS, "client_encoding": client_encoding}
        if timezone is not None:
            settings = {**settings, "timezone": timezone}
        session = await open_session(
            conninfo, settings=settings, replication=True, must_use_password=must_use_password, timeout=timeout
        )
        publisher = cls(session, is_named=is_named)
        try:
            await publisher._rows(
                "SELECT pg_catalog.set_config('search_path', '', false)", "could not clear search path"
            )
        except BaseException:
            session.abort()
            raise
        return publisher

    @property
    def server_version(self) -> int:
        """The publisher's server_version_num, such as 180006."""
        return self.session.server_version

    @property
    def in_recovery(self) -> bool:
        """True if the server is a standby. Servers report that since PostgreSQL 14."""
        return self.session.parameters.get("in_hot_standby") == "on"

    async def rename(self, application_name: str) -> None:
        """Change the application name of the session, unless the connection string has one."""
        if not self._is_named:
            sql = f"SELECT pg_catalog.set_config('application_name', {literal(application_name)}, false)"
            await self._rows(sql, "could not set application_name")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.session.abort()

    async def close(self) -> None:
        await self.session.close()

    async def _rows(self, sql: str, failure: str) -> list[tuple[str | None, ...]]:
        try:
            return await self.session.rows(sql)
        except ServerError as error:
            raise prefixed(error, failure) from error

    # --- the cluster and its slots --------------------------------------------------------------

    async def identify_system(self) -> SystemIdentity:
        rows = await self._rows(
            "IDENTIFY_SYSTEM",
            "could not receive database system identifier and timeline ID from the primary server",
        )
        with parsing("its identity"):
            systemid, timeline, position, dbname = (value or "" for value in rows[0])
            return SystemIdentity(count(systemid), count(timeline), Lsn.parse(position), dbname, self.in_recovery)

    async def timeline_ends(self, timeline: int) -> dict[int, Lsn]:
        """Return the positions at which the ancestors of `timeline` ended, by timeline number."""
        rows = await self._rows(
            f"TIMELINE_HISTORY {timeline}", f"could not receive the history of timeline {timeline} from the publisher"
        )
        with parsing(f"the history of timeline {timeline}"):
            lines = [line.split(None, 2) for line in (rows[0][1] or "").splitlines()]
            return {count(line[0]): Lsn.parse(line[1]) for line in lines if line and not line[0].startswith("#")}

    async def is_running(self, pid: int, xid: str) -> bool:
        """Return True if a transaction with this number is running in the backend with this process ID."""
        rows = await self._rows(
            f"SELECT FROM pg_catalog.pg_locks WHERE locktype = 'transactionid' AND pid = {pid}"
            f" AND transactionid = {literal(xid)} AND mode = 'ExclusiveLock' AND granted",
            "could not look up running transactions",
        )
        return bool(rows)

    async def create_slot(
        self,
        name: str,
        *,
        snapshot: commands.Snapshot,
        two_phase: bool = False,
        failover: bool = False,
        temporary: bool = False,
    ) -> CreatedSlot:
        """Create a slot for pgoutput.

        `snapshot`: `export` gives its name, valid until the next command on this session; `use` sets it for
        the transaction that is open here and has done nothing yet (begin_snapshot()); `nothing` makes none.
        Waits for every transaction that is running on the publisher: it may take as long as they do.

        Raises:
            ServerError: the publisher refuses the slot. SERIALIZATION_FAILURE: another attempt may succeed, because a
                snapshot has a limited number of unfinished transactions and subtransactions.
            ConnectionLost: the connection is lost.
        """
        command = commands.create_slot(
            name,
            self.server_version,
            snapshot=snapshot,
            two_phase=two_phase,
            failover=failover,
            temporary=temporary,
        )
        try:
            rows = await self._rows(command, f'could not create replication slot "{name}"')
        except ServerError as error:
            if error.sqlstate == SERIALIZATION_FAILURE and error.hint is None:
                error.amend(detail=_TOO_MANY_UNFINISHED[0], hint=_TOO_MANY_UNFINISHED[1])
            raise
        with parsing(f'replication slot "{name}"'):
            ((_, position, snapshot_name, _),) = rows
            return CreatedSlot(name, Lsn.parse(position or ""), snapshot_name)

    async def begin_snapshot(self) -> None:
        """Open the transaction that create_slot(snapshot="use") needs; commit() ends it."""
        await self._rows(
            "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ",
            "table copy could not start transaction on publisher",
        )

    async def set_lock_timeout(self, timeout: str) -> str:
        """Set lock_timeout of the session. Returns its former value."""
        rows = await self._rows(
            "SELECT pg_catalog.current_setting('lock_timeout'),"
            f" pg_catalog.set_config('lock_timeout', {literal(timeout)}, false)",
            "could not set lock_timeout",
        )
        return rows[0][0] or ""

    async def now(self) -> datetime:
        """Return the start of the open transaction, by the publisher's clock, in UTC."""
        rows = await self._rows(
            "SELECT pg_catalog.to_char(pg_catalog.now() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')",
            "could not receive the time from the publisher",
        )
        with parsing("its clock"):
            return datetime.strptime(rows[0][0] or "", "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)

    async def commit(self) -> None:
        await self._rows("COMMIT", "table copy could not finish transaction on publisher")

    async def drop_slot(self, name: str, *, missing_ok: bool = False, wait: bool = False) -> bool:
        """Drop a slot. Returns False if it does not exist and `missing_ok`. `wait` waits until it is inactive."""
        try:
            await self._rows(
                commands.drop_slot(name, wait=wait), f'could not drop replication slot "{name}" on publisher'
            )
        except ServerError as error:
            if missing_ok and error.sqlstate == UNDEFINED_OBJECT:
                return False
            raise
        return True

    async def alter_slot(self, name: str, *, failover: bool | None = None, two_phase: bool | None = None) -> None:
        """Change a slot (17 and later; `two_phase` 18); None leaves an option as it is. Waits while it is in use."""
        await self._rows(
            commands.alter_slot(name, failover=failover, two_phase=two_phase),
            f'could not alter replication slot "{name}"',
        )

    async def slot(self, name: str) -> SlotInfo | None:
        """A slot as pg_replication_slots shows it; None if there is none of that name."""
        version = self.server_version

        def since(major: int, column: str, otherwise: str = "NULL") -> str:
            return column if version >= major * 10000 else otherwise

        rows = await self._rows(
            "SELECT slot_name, plugin, database, coalesce(database = current_database(), false), temporary,"
            " active, active_pid, restart_lsn, confirmed_flush_lsn,"
            f" {since(13, 'wal_status')}, {since(13, 'safe_wal_size')}, {since(14, 'two_phase', 'false')},"
            f" coalesce({since(16, 'conflicting', 'false')}, false), {since(17, 'invalidation_reason')},"
            f" {since(17, 'failover', 'false')}, {since(17, 'synced', 'false')}"
            f" FROM pg_catalog.pg_replication_slots WHERE slot_name = {literal(name)}",
            f'could not look up replication slot "{name}"',
        )
        with parsing(f'replication slot "{name}"'):
            return _slot_info(name, rows[0]) if rows else None

    # --- publications and tables ----------------------------------------------------------------

    async def missing_publications(self, names: Sequence[str]) -> list[str]:
        """Return the names that the publisher does not have, in their order."""
        rows = await self._rows(
            f"SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({literals(names)})",
            "could not receive list of publications from the publisher",
        )
        with parsing("publications"):
            existing = {row[0] for row in rows}
        return [name for name in names if name not in existing]

    async def publication_names(self) -> list[str]:
        """The names of all publications of the publisher, in their order."""
        rows = await self._rows(
            "SELECT pubname FROM pg_catalog.pg_publication ORDER BY pubname",
            "could not receive list of publications from the publisher",
        )
        with parsing("publications"):
            return [row[0] or "" for row in rows]

    async def column_without_binary(self, publications: Sequence[str]) -> str | None:
        """Describe a published column whose values cannot be sent in binary format. None: there is none.

        The publisher must have version 14 or newer.
        """
        failure = "could not receive the types of published columns from the publisher"
        rows = await self._rows(tables.columns_without_binary_query(), failure)
        if not rows:
            return None
        published = await self._rows(tables.tables_query(publications, self.server_version), failure)
        names = {row[:2] for row in published}
        for schema, table, column, kind in rows:
            if (schema, table) in names:
                return f'column "{column}" of table "{schema}.{table}" has type {kind}, which has no binary format'
        return None

    async def tables(self, publications: Sequence[str]) -> list[tuple[str, str]]:
        """(schema, name) of every table of the publications, each once.

        Raises PublisherError if two publications have different column lists for a table, or a name is no text.
        """
        rows = await self._rows(
            tables.tables_query(publications, self.server_version),
            "could not receive list of replicated tables from the publisher",
        )
        published: list[tuple[str, str]] = []
        with parsing("replicated tables"):
            for schema, name, *_ in rows:
                if published and published[-1] == (schema, name):
                    raise _different_column_lists(published[-1])
                published.append((schema or "", name or ""))
        for table in published:
            self._require_text("table", *table)
        return published

    def _require_text(self, kind: str, schema: str, name: str) -> None:
        """Raise PublisherError if the name of a relation has bytes that are no characters."""
        if not (is_text(schema) and is_text(name)):
            raise PublisherError(
                f"{kind} {sql_name(schema, name)} has a name that cannot be read",
                detail=f"It has bytes that are no characters of the encoding {self.session.encoding} here.",
                hint=f"Rename the {kind} on the publisher.",
                sqlstate=CHARACTER_NOT_IN_REPERTOIRE,
            )

    async def sequences(self, publications: Sequence[str]) -> list[tuple[str, str]]:
        """Return (schema, name) of the publications' sequences, ordered by them.

        Before PostgreSQL 19 these are the sequences that are owned by published columns.
        """
        rows = await self._rows(
            sequences.published_query(publications, self.server_version),
            "could not receive list of replicated sequences from the publisher",
        )
        with parsing("replicated sequences"):
            sequences_seen = [(schema or "", name or "") for schema, name in rows]
        for schema, name in sequences_seen:
            self._require_text("sequence", schema, name)
        if all(schema != OWN_SCHEMA for schema, _ in sequences_seen):
            return sequences_seen
        failure = "could not find out which sequences of the publisher are subscriber's own"
        own = {name for (name,) in await self._rows(OWN_SEQUENCES, failure)}
        return [(schema, name) for schema, name in sequences_seen if schema != OWN_SCHEMA or name not in own]

    async def sequence_values(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], SequenceValue | None]:
        """Read sequences.

        Args:
            names: Schema and name of each sequence.

        Returns:
            The value of each sequence that exists. None: this role may not read it.
        """
        values: dict[tuple[str, str], SequenceValue | None] = {}
        for at in range(0, len(names), sequences.BATCH_SIZE):
            values |= await self._sequence_values(names[at : at + sequences.BATCH_SIZE])
        return values

    async def restrict_views(self) -> None:
        """Refuse to read views and foreign tables in this session, if the server can.

        A relation is looked up in the catalog and then read by its name. In between its owner could replace it with a
        view, whose functions would run with the rights of this role. Servers have this setting since the minor
        releases of August 2024.

        Foreign tables that are partitions are excepted, see table().
        """
        self._restricts = True
        await self._restrict(admits=False)

    async def _restrict(self, *, admits: bool) -> None:
        self._admits = admits
        await self._rows(
            f"SELECT pg_catalog.set_config(name, 'view{'' if admits else ', foreign-table'}', false)"
            " FROM pg_catalog.pg_settings WHERE name = 'restrict_nonsystem_relation_kind'",
            "could not restrict views",
        )

    async def _admit_foreign_partitions(self, schema: str, name: str, relid: int) -> None:
        """Let the session read the foreign tables that are partitions of a table, if their owners are trusted.

        A foreign table is read with the user mapping of this role, so its owner chooses which rows of another server
        this role reads.
        """
        failure = f'could not fetch table info for table "{schema}.{name}" from publisher'
        foreign = await self._rows(tables.foreign_partitions_query(relid), failure)
        untrusted = [(partition, owner) for partition, owner in foreign if owner is not None]
        if untrusted:
            partition, owner = untrusted[0]
            raise PublisherError(
                f'partition {partition} of table "{schema}.{name}" is a foreign table, which role "{owner}" controls',
                detail="Its rows would be read with the rights of the role of the connection.",
                hint=f'Connect to the publisher as "{owner}", or detach the partition. Or give the table, the partition'
                " and its server to a superuser.",
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
        if bool(foreign) != self._admits:
            await self._restrict(admits=bool(foreign))

    async def _sequence_values(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], SequenceValue | None]:
        failure = "could not fetch sequence information from the publisher"
        rows = await self._rows(sequences.values_query(names, self.server_version), failure)
        last_values: dict[str | None, tuple[str | None, ...]] = {}
        with parsing("sequences"):
            readable = [(count(row[0]), names[count(row[0])]) for row in rows if row[1] == "t"]
        if features.PUBLISHED_SEQUENCES.is_in(self.server_version):
            last_values = {row[0]: row[2:4] for row in rows if row[2] is not None}
        elif readable:
            await self.restrict_views()
            last = await self._rows(sequences.last_values_query(readable), failure)
            last_values = {row[0]: row[1:] for row in last}
        values: dict[tuple[str, str], SequenceValue | None] = {}
        with parsing("sequences"):
            for place, may_read, _, _, lsn, type_oid, start, increment, least, greatest, cycles in rows:
                name, last_value = names[count(place)], last_values.get(place)
                if last_value is None:
                    if may_read == "f":
                        values[name] = None
                    continue  # it was dropped while it was read
                limits = signed(start), signed(increment), signed(least), signed(greatest)
                definition = SequenceDefinition(oid(type_oid), *limits, cycles=cycles == "t")
                values[name] = SequenceValue(
                    signed(last_value[0]), last_value[1] == "t", Lsn.parse(lsn or ""), definition
                )
        return values

    async def publications_with_other_origins(
        self, publications: Sequence[str], known: Sequence[tuple[str, str]] = ()
    ) -> list[str]:
        """Return the publications with a table that the publisher itself replicates from another server.

        PostgreSQL's own subscriptions on the publisher count, and ours too. `known` are (schema, name) of tables to
        leave out.
        """
        failure = "could not receive list of replicated tables from the publisher"
        sources = ["pg_catalog.pg_subscription_rel"]
        ours = await self._rows(
            "SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            " JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner"
            f" WHERE {IS_OURS} AND c.relname = 'pg_subscription_rel'"
            # Any role that may create a schema can make a view with that name.
            " AND (r.rolsuper OR NOT pg_catalog.current_setting('is_superuser')::bool)"
            " AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')",
            failure,
        )
        if ours:
            sources.append("subscriber.pg_subscription_rel")
        with_others: set[str] = set()
        for source in sources:
            rows = await self._rows(tables.foreign_origins_query(publications, known, source), failure)
            with parsing("publications"):
                with_others.update(row[0] for row in rows if row[0] is not None)
        return [name for name in publications if name in with_others]

    async def table(self, schema: str, name: str, publications: Sequence[str]) -> PublishedTable:
        """Return the part of a table that the publications publish.

        After restrict_views(), the session may read foreign tables that are partitions of this table, and of no other.

        Raises PublisherError if there is no such table, or its column lists differ between publications; and after
        restrict_views(), if the owner of a partition that is a foreign table is not trusted.
        """
        failure = f'could not fetch table info for table "{schema}.{name}" from publisher'
        rows = await self._rows(tables.relation_query(schema, name, self.server_version), failure)
        if not rows:
            raise PublisherError(f'table "{schema}.{name}" not found on publisher', sqlstate=UNDEFINED_OBJECT)
        with parsing(f'table "{schema}.{name}"'):
            relid_text, replica_identity, relkind, size = rows[0]
            relid, total_bytes = oid(relid_text), count(size)
            ReplicaIdentity(replica_identity or "")
        listed = await self._listed_columns(schema, name, relid, publications)
        described = await self._rows(tables.columns_query(relid, self.server_version), failure)
        with parsing(f'the columns of table "{schema}.{name}"'):
            columns = tuple(
                PublishedColumn(column or "", oid(kind), modifier(given), key == "t", generated == "t")
                for number, column, kind, given, key, generated in described
                if listed is None or number in listed
            )
        filters = await self._row_filters(schema, name, relid, publications)
        if self._restricts and (relkind == "p" or self._admits):
            await self._admit_foreign_partitions(schema, name, relid)
        return PublishedTable(schema, name, relid, replica_identity or "", relkind or "", columns, filters, total_bytes)

    async def _listed_columns(
        self, schema: str, name: str, relid: int, publications: Sequence[str]
    ) -> frozenset[str] | None:
        """The attribute numbers of the column list; None: there is none, all columns are published."""
        if not features.COLUMN_LISTS.is_in(self.server_version):
            return None
        rows = await self._rows(
            tables.column_lists_query(relid, publications),
            f'could not fetch column list info for table "{schema}.{name}" from publisher',
        )
        if len(rows) > 1:
            raise _different_column_lists((schema, name))
        with parsing(f'the column list of table "{schema}.{name}"'):
            return frozenset(rows[0][0].split()) if rows and rows[0][0] is not None else None

    async def _row_filters(self, schema: str, name: str, relid: int, publications: Sequence[str]) -> tuple[str, ...]:
        if not features.COLUMN_LISTS.is_in(self.server_version):
            return ()
        rows = await self._rows(
            tables.row_filters_query(relid, publications),
            f'could not fetch table WHERE clause info for table "{schema}.{name}" from publisher',
        )
        with parsing(f'the row filters of table "{schema}.{name}"'):
            filters = [row[0] for row in rows]
        return () if None in filters else tuple(text for text in filters if text is not None)


def prefixed(error: ServerError, failure: str) -> ServerError:
    """Return the error with the failed action in front of its message: `failure: ERROR:  message`."""
    severity = error.fields.get("S", "ERROR")
    return ServerError({**error.fields, "M": f"{failure}: {severity}:  {error.message}"})


def _different_column_lists(table: tuple[str, str]) -> PublisherError:
    return PublisherError(
        f'cannot use different column lists for table "{table[0]}.{table[1]}" in different publications',
        sqlstate=FEATURE_NOT_SUPPORTED,
    )


def _slot_info(name: str, row: tuple[str | None, ...]) -> SlotInfo:
    _, plugin, database, here, temporary, active, pid, restart, confirmed, *rest = row
    status, safe, two_phase, conflicting, reason, failover, synced = rest
    return SlotInfo(
        name=name,
        plugin=plugin,
        database=database,
        in_this_database=here == "t",
        temporary=temporary == "t",
        active=active == "t",
        active_pid=count(pid) or None,
        restart_lsn=Lsn.parse(restart) if restart else None,
        confirmed_flush=Lsn.parse(confirmed) if confirmed else None,
        wal_status=status,
        safe_wal_size=int(safe) if safe else None,  # negative when it is exceeded
        two_phase=two_phase == "t",
        conflicting=conflicting == "t",
        invalidation_reason=reason,
        failover=failover == "t",
        synced=synced == "t",
    )
