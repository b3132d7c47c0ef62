"""Hints for sessions that a server refuses, with the statement or the line of a file that allows them.

The SQLSTATE decides. Only the kind of class 28 is read from the message, which is in English if lc_messages is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from subscriber.display import sql_identifier
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    CLASS_INVALID_AUTHORIZATION,
    INSUFFICIENT_PRIVILEGE,
    INVALID_CATALOG_NAME,
    INVALID_PASSWORD,
    TOO_MANY_CONNECTIONS,
)

_NO_ENTRY = re.compile(r'pg_hba\.conf .*?(replication connection )?(?:from|for) host "([0-9a-fA-F.:]+)"')
_NAME = re.compile(r"\w+")


def refusal_remedy(
    sqlstate: str, message: str, parameters: Mapping[str, str], *, replication: bool, has_password: bool
) -> Remedy | None:
    """Return what to do about a session that a server has refused. None: there is none for this SQLSTATE.

    Args:
        sqlstate: Of the server's error.
        message: Of the server's error.
        parameters: Of the connection, complete.
        replication: The session was to be a walsender.
        has_password: The connection string or the password file has a password.
    """
    user = sql_identifier(parameters["user"])
    attributes = "LOGIN REPLICATION" if replication else "LOGIN"
    match sqlstate:
        case code if code == INVALID_PASSWORD and not has_password:
            return Remedy(
                "the connection string has no password. Add it with the keyword password, or the name of a password"
                " file with the keyword passfile."
            )
        case code if code == INVALID_PASSWORD:
            return Remedy(
                "correct the password in the connection string.",
                alternative=Remedy(f"on that server: ALTER ROLE {user} PASSWORD '…';"),
            )
        case code if code == INVALID_CATALOG_NAME:
            create = f"CREATE DATABASE {sql_identifier(parameters['dbname'])};"
            return Remedy("correct dbname.", alternative=Remedy("on that server", create))
        case code if code == INSUFFICIENT_PRIVILEGE and f'"{parameters["dbname"]}"' in message:
            grant = f"GRANT CONNECT ON DATABASE {sql_identifier(parameters['dbname'])} TO {user};"
            return Remedy("on that server, as the owner of the database", grant)
        case code if code == INSUFFICIENT_PRIVILEGE and replication:
            return Remedy("on that server, as a superuser", f"ALTER ROLE {user} WITH REPLICATION;")
        case code if code == TOO_MANY_CONNECTIONS:
            what = "max_wal_senders" if replication else "max_connections"
            return Remedy(
                f"that server has no connection left. Its setting: ALTER SYSTEM SET {what} = …; and a restart."
            )
        case code if code.startswith(CLASS_INVALID_AUTHORIZATION):
            if match := _NO_ENTRY.search(message):
                return _line(match[2], parameters, replication=replication)
            if "not permitted to log in" in message:
                return Remedy("on that server", f"ALTER ROLE {user} WITH LOGIN;")
            if message.endswith("does not exist"):
                return Remedy(
                    "correct user.",
                    alternative=Remedy(f"on that server: CREATE ROLE {user} {attributes} PASSWORD '…';"),
                )
            return Remedy(
                f"its pg_hba.conf has no line for this role, database and address, or role {user} may not log in or"
                " has no REPLICATION attribute."
            )
    return None


def _line(address: str, parameters: Mapping[str, str], *, replication: bool) -> Remedy:
    # Logical replication connects to a database, so the line of the database applies.
    database, user = _word(parameters["dbname"]), _word(parameters["user"])
    mask = 128 if ":" in address else 32
    line = f"host {database} {user} {address}/{mask} scram-sha-256"
    return Remedy(
        f"add a line to its pg_hba.conf before lines that reject it: {line}",
        then=Remedy("there", "SELECT pg_reload_conf();"),
    )


def _word(name: str) -> str:
    """Return a name as pg_hba.conf has it. Quotes also keep the words of the file, such as all, from their meaning."""
    keywords = ("all", "replication", "sameuser", "samerole", "samegroup")
    return name if _NAME.fullmatch(name) and name not in keywords else f'"{name}"'
