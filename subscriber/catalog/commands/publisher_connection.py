"""A statement's connection to the publisher, with PostgreSQL's messages for its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import asyncpg

from subscriber.catalog.connection import Connection, encoding_of
from subscriber.connection import authentication
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.errors import libpq_message
from subscriber.display import sql_identifier, sql_literal
from subscriber.errors import ConnectionLost, ConninfoError, ServerError, StatementError
from subscriber.publisher.connection import Publisher
from subscriber.publisher.publications import publication_remedy
from subscriber.remedy import Remedy
from subscriber.server_version import Wording
from subscriber.sqlstate import (
    CONNECTION_FAILURE,
    FEATURE_NOT_SUPPORTED,
    INSUFFICIENT_PRIVILEGE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_OBJECT,
)

# Its arguments are the severity (NOTICE or WARNING), the message, the detail and the hint.
Notice: TypeAlias = Callable[[str, str, str | None, str | None], None]

OWN_TRANSACTION = "SELECT pg_catalog.pg_backend_pid(), (pg_catalog.txid_current() % (2 ^ 32)::bigint)::text"

# A setting of one transaction. Only a superuser can change the second one.
HIDE_PARAMETERS = """
SELECT pg_catalog.set_config('log_parameter_max_length_on_error', '0', true),
       CASE WHEN r.rolsuper THEN pg_catalog.set_config('log_parameter_max_length', '0', true) END
  FROM pg_catalog.pg_roles r WHERE r.rolname = CURRENT_USER
"""
# A wrapper makes connection strings since PostgreSQL 19. Before, postgres_fdw is the one whose options are known.
FOREIGN_SERVER = """
SELECT f.oid, w.fdwname::text AS wrapper, c.conninfo, c.problem, pg_catalog.pg_get_userbyid($2::oid)::text AS role,
       pg_catalog.has_server_privilege($2::oid, f.oid, 'USAGE') AS may_use,
       CASE WHEN pg_catalog.to_jsonb(w) ? 'fdwconnection' THEN pg_catalog.to_jsonb(w) ->> 'fdwconnection' <> '0'
            ELSE p.proname IS NOT DISTINCT FROM 'postgres_fdw_handler' END AS connects
  FROM pg_catalog.pg_foreign_server f JOIN pg_catalog.pg_foreign_data_wrapper w ON w.oid = f.srvfdw
  LEFT JOIN pg_catalog.pg_proc p ON p.oid = w.fdwhandler,
       LATERAL subscriber.connection_of_server($2::oid, f.oid) c
 WHERE f.srvname = $1::text::name
"""


class PublisherUnreachable(StatementError):
    """`reason` is what libpq would say."""

    sqlstate = CONNECTION_FAILURE

    def __init__(self, name: str, reason: str, hint: Remedy | None = None) -> None:
        super().__init__(f'subscription "{name}" could not connect to the publisher: {reason}', hint=hint)
        self.reason = reason


def check_conninfo(conninfo: str, *, password: bool) -> None:
    """Refuse a connection string that cannot be understood, or that lacks the password it must have.

    Raises StatementError (42601) or PublisherError (2F003).
    """
    try:
        parsed = Conninfo.parse(conninfo)
    except ConninfoError as error:
        raise StatementError(f"invalid connection string syntax: {error.message}") from error
    if password:
        authentication.check_conninfo(parsed)


async def hide_parameters(connection: Connection) -> None:
    """Keep the parameters of later statements of the transaction out of the target's log.

    They have the password of a connection string. With log_statement, the log of a target has them nevertheless if the
    role is not a superuser.
    """
    await connection.execute(HIDE_PARAMETERS)


@dataclass(frozen=True, slots=True)
class ConnectionSource:
    """The source of a statement's connection string."""

    conninfo: str | None = field(repr=False)  # None: a foreign server that gives none yet
    server: int = 0  # OID of the foreign server; 0: the statement has the connection string


async def resolve(
    connection: Connection,
    conninfo: str | None,
    server: str | None,
    owner: int,
    *,
    password: bool,
    connects: bool,
    notice: Notice,
) -> ConnectionSource:
    """Return the connection string of CONNECTION or SERVER, after PostgreSQL's checks.

    Args:
        connection: A connection to the target.
        conninfo: The connection string of the statement, or None.
        server: The name of the foreign server, or None.
        owner: OID of the subscription's owner, whose user mapping is read.
        password: The connection string must have a password.
        connects: The statement connects to the publisher. If it does not, a missing user mapping is a warning.
        notice: Receives the warning.

    Raises:
        StatementError: The foreign server does not exist, cannot be used, or gives no connection string.
        PublisherError: The connection string lacks the password.
    """
    if server is None:
        assert conninfo is not None
        check_conninfo(conninfo, password=password)
        return ConnectionSource(conninfo)
    foreign_server = await connection.fetchrow(FOREIGN_SERVER, server, owner)
    if foreign_server is None:
        raise StatementError(f'server "{server}" does not exist', sqlstate=UNDEFINED_OBJECT)
    name, role = sql_identifier(server), sql_identifier(foreign_server["role"])
    if not foreign_server["may_use"]:
        grant = f"GRANT USAGE ON FOREIGN SERVER {name} TO {role};"
        raise StatementError(
            f"permission denied for foreign server {server}",
            hint=Remedy("on the target, as the owner of the server", grant),
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
    if foreign_server["problem"] is not None and not (connects and foreign_server["connects"]):
        notice("WARNING", foreign_server["problem"], None, None)
    if not foreign_server["connects"]:
        raise StatementError(
            f'foreign-data wrapper "{foreign_server["wrapper"]}" does not support subscription connections',
            detail="Foreign-data wrapper must be defined with CONNECTION specified.",
            sqlstate=FEATURE_NOT_SUPPORTED,
        )
    if foreign_server["conninfo"] is None:
        if connects:
            mapping = f"CREATE USER MAPPING FOR {role} SERVER {name} OPTIONS (user '…', password '…');"
            hint = Remedy("on the target, as the owner of the server", mapping)
            raise StatementError(foreign_server["problem"], hint=hint, sqlstate=UNDEFINED_OBJECT)
        return ConnectionSource(None, foreign_server["oid"])
    check_conninfo(foreign_server["conninfo"], password=password)
    return ConnectionSource(foreign_server["conninfo"], foreign_server["oid"])


@asynccontextmanager
async def connect_to_publisher(
    connection: Connection, name: str, conninfo: str, *, password: bool
) -> AsyncIterator[Publisher]:
    """Connect as subscription `name`, and close when the block ends. `connection` is one to the target.

    Raises PublisherUnreachable if that fails, and PublisherError if a password had to be used and was not.
    """
    check_conninfo(conninfo, password=password)
    try:
        publisher = await Publisher.connect(
            conninfo,
            application_name=name,
            client_encoding=encoding_of(connection),
            must_use_password=password,
        )
    except (ConninfoError, ConnectionLost, ServerError) as error:
        raise PublisherUnreachable(name, libpq_message(error), error.remedy) from error
    try:
        yield publisher
    finally:
        await publisher.close()


async def refuse_own_cluster(connection: asyncpg.Connection, publisher: Publisher, slot: str) -> None:
    """Refuse to create a slot that would wait for this very transaction, because it runs on the publisher too.

    PostgreSQL itself waits there until a user cancels it. Call it after the transaction has written.
    """
    pid, xid = await connection.fetchrow(OWN_TRANSACTION) or (0, "0")
    if await publisher.is_running(pid, xid):
        raise StatementError(
            f'could not create replication slot "{slot}": the publisher is in the same cluster as the target',
            detail="The slot's creation would wait for this statement to end.",
            hint=Remedy(
                "create the slot first, in the publisher's database",
                f"SELECT pg_create_logical_replication_slot({sql_literal(slot)}, 'pgoutput');",
                then=Remedy("use it WITH (create_slot = false)."),
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def drop_slot(publisher: Publisher, name: str, notice: Notice, *, missing_ok: bool) -> None:
    """Drop a slot as soon as it is inactive, and report it."""
    if await publisher.drop_slot(name, missing_ok=missing_ok, wait=True):
        notice("NOTICE", f'dropped replication slot "{name}" on publisher', None, None)


async def drop_main_slot(publisher: Publisher, name: str, system_id: str | None, notice: Notice) -> None:
    """Drop the slot of a subscription that is dropped. A slot that is lost already is a notice, and no error.

    On another server than the subscription's publisher, a missing slot is an error: the real one would retain WAL.

    Args:
        publisher: A session on the publisher.
        name: The slot.
        system_id: The system identifier of the subscription's publisher. None: it is unknown.
        notice: Receives the notice.
    """
    is_known = system_id is not None and str((await publisher.identify_system()).systemid) == system_id
    if await publisher.drop_slot(name, missing_ok=is_known, wait=True):
        notice("NOTICE", f'dropped replication slot "{name}" on publisher', None, None)
    else:
        notice("NOTICE", f'replication slot "{name}" does not exist on publisher, skipping', None, None)


async def warn_of_missing_publications(publisher: Publisher, names: tuple[str, ...], notice: Notice) -> None:
    """They may be created later, so this is no error."""
    missing = await publisher.missing_publications(names)
    if missing:
        subject, verb = ("publication", "does") if len(missing) == 1 else ("publications", "do")
        shown = ", ".join(f'"{name}"' for name in missing)
        hint = str(await publication_remedy(publisher, missing))
        notice("WARNING", f"{subject} {shown} {verb} not exist on the publisher", None, hint)


async def warn_of_other_origins(
    publisher: Publisher,
    subscription: str,
    publications: tuple[str, ...],
    notice: Notice,
    *,
    origin: str,
    copy_data: bool,
    retain_dead_tuples: bool,
    wording: Wording,
    known: Sequence[tuple[str, str]] = (),
) -> None:
    """Warn if the publisher replicates a published table from another server, and the options suppose otherwise.

    With origin = none, a copy does not know the origin of a row. With retain_dead_tuples and another origin, the
    publisher sends changes of servers whose clocks and positions decide nothing here.

    Args:
        publisher: a session on the publisher.
        subscription: the name of the subscription.
        publications: of the subscription.
        notice: receives the warning.
        origin: option of the subscription.
        copy_data: new tables are copied.
        retain_dead_tuples: option of the subscription.
        wording: of the target's server.
        known: (schema, name) of tables that are not copied, because the subscription has them already.

    Source: check_publications_origin_tables() in src/backend/commands/subscriptioncmds.c
    """
    is_none = origin.lower() == "none"
    retains = retain_dead_tuples and not is_none
    if not retains and not (copy_data and is_none):
        return
    with_others = await publisher.publications_with_other_origins(publications, () if retains else known)
    if not with_others:
        return
    names = ", ".join(f'"{name}"' for name in with_others)
    a_publication, contain = ("a publication", "contains") if len(with_others) == 1 else ("publications", "contain")
    if retains:
        message = (
            f'subscription "{subscription}" enabled retain_dead_tuples but might not reliably detect conflicts for'
            " changes from different origins"
        )
        hint = "Consider using origin = NONE or disabling retain_dead_tuples."
    else:
        message = (
            f'subscription "{subscription}" requested copy_data with origin = NONE but might copy data that had a'
            " different origin"
        )
        hint = "Verify that initial data copied from the publisher tables did not come from other origins."
    being_created = "" if retains or wording is Wording.POSTGRESQL_19 else " being created"
    notice(
        "WARNING",
        message,
        f"The subscription{being_created} subscribes to {a_publication} ({names}) that {contain} tables that are"
        " written to by other subscriptions.",
        hint,
    )
