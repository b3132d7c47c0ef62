"""Explanation of an apply session's error: its CONTEXT, or the fact that only the table's shape has changed."""

from __future__ import annotations

import re

from subscriber.apply.error_context import error_context
from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.connection.pipeline import Pipeline
from subscriber.display import sql_identifier
from subscriber.errors import ServerError, StaleCatalog, StaleMapping, SubscriberError
from subscriber.remedy import Remedy
from subscriber.server_version import Wording
from subscriber.sqlstate import (
    FEATURE_NOT_SUPPORTED,
    INSUFFICIENT_PRIVILEGE,
    INTERNAL_ERROR,
    PROGRESS_OUT_OF_STEP,
    SUBSCRIPTION_ALTERED,
    TARGET_TABLE_CHANGED,
)
from subscriber.targets.postgres.session import schema_check
from subscriber.targets.postgres.session.roles import RoleSwitcher
from subscriber.targets.postgres.session.statement_context import StatementContext

MOVED = "another session has moved the progress of this subscription"  # as the functions of the schema say it

_MOVES = ("subscriber.advance(", "subscriber.finish_copy(", "subscriber.record_range(")

# CONTEXT of an error in a parameter: unnamed portal parameter $1 = '...'  (bind_param_error_callback() in postgres.c).
# Translations keep $1 at the end of the words, except the Spanish one without a $ and the Korean one with words behind.
_PARAMETER = re.compile(r"(?:[^$\n]*\$|portal sin nombre, parámetro )(\d+)(?: 매개 변수)?(?: = .*)?", re.DOTALL)


def explain(
    error: SubscriberError, pipeline: Pipeline, roles: RoleSwitcher, origin: str, wording: Wording
) -> SubscriberError:
    """Add the CONTEXT of the failed statement, or replace the error if only the table's shape has changed.

    `error` is the pipeline's.
    """
    if _is_overtaken(error):
        return ServerError({"S": "ERROR", "V": "ERROR", "C": PROGRESS_OUT_OF_STEP, "M": MOVED})
    if error.sqlstate == SUBSCRIPTION_ALTERED:
        return StaleCatalog(error.message)
    if error.sqlstate == TARGET_TABLE_CHANGED:
        return StaleMapping(error.message)
    note = pipeline.failed_note
    if not isinstance(note, StatementContext) or note.transaction is None:
        return error
    if note.schema_unchecked and error.sqlstate.startswith(schema_check.OF_AN_OLD_SHAPE):
        return StaleMapping(error.message)
    if error.sqlstate == INSUFFICIENT_PRIVILEGE and isinstance(error, ServerError) and note.mapping is not None:
        error = row_security(error, note.mapping, roles)
        if note.mapping.local.closed_schemas and error.hint is None:
            error.amend(hint=_open_schemas(note.mapping.local, roles))
    if pipeline.session.error is None:
        add_context(error, note, origin, wording)
    return error


def _is_overtaken(error: SubscriberError) -> bool:
    """Return True if another session has moved the progress record and committed while this one waited.

    Large objects are a system catalog, whose updates do not wait for the new version of a row: the server only says
    "tuple concurrently updated", in its language. Its function and ours are named in every language.
    """
    if not isinstance(error, ServerError) or error.sqlstate != INTERNAL_ERROR:
        return False
    context = error.fields.get("W", "")
    return error.fields.get("R") == "simple_heap_update" and any(name in context for name in _MOVES)


def add_context(error: SubscriberError, note: StatementContext, origin: str, wording: Wording) -> None:
    """The line PostgreSQL's apply worker adds to the context that the server gave, if any."""
    column = _failed_column(error, note)
    if column is not None:
        error.context.clear()  # names the parameter, and shows its value if the server is so configured
    relation = note.mapping.label if note.mapping is not None else None
    transaction = note.transaction
    if transaction is None:
        error.locate(relation, error.xid, error.finish_lsn)
    else:
        error.locate(relation, transaction.xid or None, transaction.finish_lsn or None)
    error.context.append(error_context(origin, note.message, wording, relation, column, transaction))


def _open_schemas(local: LocalRelation, roles: RoleSwitcher) -> Remedy:
    """The error may be that one, or of a privilege on the table: the hint says which is which."""
    role = sql_identifier(roles.name([local]))
    schemas = ", ".join(sql_identifier(name) for name in local.closed_schemas)
    return Remedy(
        f"role {role} may not use schema {schemas} either. To grant that on the target",
        f"GRANT USAGE ON SCHEMA {schemas} TO {role};",
    )


def row_security(error: ServerError, mapping: RelationMapping, roles: RoleSwitcher) -> SubscriberError:
    """With row_security = off the server refuses where rows would be left out; say what that means here."""
    if error.fields.get("R") != "check_enable_rls":
        return error
    role = roles.name([mapping.local])
    return ServerError(
        {
            **error.fields,
            "C": FEATURE_NOT_SUPPORTED,
            "M": f'user "{role}" cannot replicate into relation with row-level security enabled: '
            f'"{mapping.local.name}"',
        }
    )


def _failed_column(error: SubscriberError, note: StatementContext) -> str | None:
    """The column whose value could not be read; None when the error is no such one."""
    if len(error.context) != 1 or note.plan is None or note.mapping is None:
        return None
    match = _PARAMETER.fullmatch(error.context[0])
    if match is None or int(match[1]) > len(note.plan.parameters):
        return None
    _, index = note.plan.parameters[int(match[1]) - 1]
    return note.mapping.attributes[index].name
