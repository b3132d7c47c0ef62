"""Statements that run as another role, in an operation that the role's code cannot leave.

**Purpose.** A statement about a table runs code of its owner: casts and operators in the query that validates a foreign
key, functions of expressions that the planner computes in advance, checks of a domain whose literal is parsed. After
SET ROLE such code can reset the role, and then has the rights of the session's own role. PostgreSQL has a boundary that
SQL cannot request: the security-restricted operation, in which CREATE INDEX calls the functions of an index. So the
statement is executed by a function of an index, on a temporary table of one row that belongs to the role.

    CREATE TEMP TABLE t (statement)     one row, the statements
    ALTER TABLE t OWNER TO role
    CREATE INDEX ON t (perform(statement))
    DISCARD TEMP

**Invariants.**

- The statements, and all code that they run, have the rights of the role alone. SET ROLE, SET SESSION AUTHORIZATION,
  temporary tables, deferred triggers, cursors WITH HOLD, PREPARE, DEALLOCATE, DISCARD, CLOSE and LISTEN are errors
  there. Settings have their former values afterwards. What remains are advisory locks of the session.
- The code can create functions and types in the temporary schema, and a type there has precedence over one of
  pg_catalog. So no type is named without its schema until DISCARD TEMP has removed them, in the same transaction.
- Names of the helpers are random: nothing can be in their place.

**Failure cases.** A statement fails: its error is raised, and the caller's transaction is rolled back. The role or the
session may not create temporary tables: the error has the statement that grants it.

Source: SECURITY_RESTRICTED_OPERATION in miscadmin.h, DefineIndex() in indexcmds.c, InSecurityRestrictedOperation().
"""

from __future__ import annotations

from secrets import token_hex

import asyncpg

from subscriber.catalog.connection import Connection
from subscriber.display import sql_identifier
from subscriber.errors import StatementError
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE

_SESSION = """
SELECT pg_catalog.current_setting('is_superuser') = 'on' AS is_superuser, session_user::pg_catalog.text AS role,
       pg_catalog.current_database()::pg_catalog.text AS database,
       pg_catalog.has_database_privilege(session_user, pg_catalog.current_database(), 'TEMPORARY') AS session_may,
       pg_catalog.has_database_privilege($1::pg_catalog.name, pg_catalog.current_database(), 'TEMPORARY') AS role_may
"""
# EXECUTE takes several statements. A function of an index has to be immutable, and such a function executes queries
# only, so it calls another one.
_HELPERS = """
CREATE FUNCTION pg_temp.{name}_execute(pg_catalog.text) RETURNS pg_catalog.void LANGUAGE plpgsql
    AS $_$ BEGIN EXECUTE $1; END $_$;
CREATE FUNCTION pg_temp.{name}(pg_catalog.text) RETURNS pg_catalog.int4 LANGUAGE plpgsql IMMUTABLE
    AS $_$ BEGIN PERFORM pg_temp.{name}_execute($1); RETURN 0; END $_$;
GRANT EXECUTE ON FUNCTION pg_temp.{name}_execute(pg_catalog.text), pg_temp.{name}(pg_catalog.text) TO PUBLIC;
CREATE TEMPORARY TABLE {name} (statement pg_catalog.text);
"""


async def run_restricted(connection: Connection, role: str, statements: str) -> None:
    """Run statements as a role, in the connection's transaction. The session's temporary objects are dropped.

    Args:
        connection: a session whose role may act as `role`. It is in a transaction.
        role: the role that runs the statements. Code which they call runs as this role as well.
        statements: statements that can run in a transaction block, separated by semicolons.

    Raises:
        asyncpg.PostgresError: a statement failed.
        StatementError: the session or the role may not create temporary tables.
    """
    session = await connection.fetchrow(_SESSION, role)
    assert session is not None
    needed = [session["role"], role]
    if not session["is_superuser"] and not (session["session_may"] and session["role_may"]):
        raise _may_not_create(session["database"], needed)
    name = f"subscriber_{token_hex(8)}"
    await connection.execute("SET LOCAL search_path = ''; SET LOCAL standard_conforming_strings = on")
    await connection.execute(_HELPERS.format(name=name))
    await connection.execute(f"INSERT INTO pg_temp.{name} VALUES ($1)", statements)
    await connection.execute(f"ALTER TABLE pg_temp.{name} OWNER TO {identifier(role)}")
    # Other roles have to own the table. A superuser does not, but its code would read that it is_superuser.
    if session["role_may"]:
        await connection.execute(f"SET LOCAL ROLE {identifier(role)}")
    try:
        await connection.execute(f"CREATE INDEX ON pg_temp.{name} (pg_temp.{name}(statement))", timeout=None)
    except asyncpg.PostgresError as error:
        error.add_note(f"as role {sql_identifier(role)}")
        raise
    await connection.execute("RESET ROLE; DISCARD TEMP")


def _may_not_create(database: str, roles: list[str]) -> StatementError:
    names = ", ".join(map(sql_identifier, dict.fromkeys(roles)))
    return StatementError(
        f'permission denied to create temporary tables in database "{database}"',
        detail=f"Statements about a table of another role run within an index of a temporary table: roles {names}.",
        hint=Remedy(
            "as the owner of the database", f"GRANT TEMPORARY ON DATABASE {sql_identifier(database)} TO {names};"
        ),
        sqlstate=INSUFFICIENT_PRIVILEGE,
    )
