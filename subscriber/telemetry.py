"""What every room says about itself: log records with the parts of PostgreSQL's own and fixed keys.

    telemetry.log(telemetry.LOG, "logical replication apply worker has started", event="worker.started")

The keys are a TypedDict, so that a misspelt one does not type-check. Where a whole task speaks for one
subscription or worker, `with telemetry.bound(subscription=…, worker=…):` says so once; tasks started
inside inherit it. How records look and where they go is decided in cli/logs.py.

Row values stay out of a record's `parts`. Where PostgreSQL's own log has them (a conflict's DETAIL, the
server's DETAIL of a duplicate key), they are in `exact`, which only the `postgres` format prints.
Passwords of connection strings are in neither.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypedDict, Unpack

from subscriber.display import printable
from subscriber.errors import ConflictError, ServerError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.redaction import redact
from subscriber.sqlstate import CLASS_DATA_EXCEPTION

# PostgreSQL's levels, on the standard library's scale.
DEBUG, LOG, WARNING, ERROR, FATAL = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL

logger = logging.getLogger("subscriber")


class LogKeys(TypedDict, total=False):
    """What a record can be searched by; a key that does not apply is left out."""

    event: str  # a name that stays when the message changes: worker.started, apply.conflict, …
    subscription: str  # its name
    worker: str  # launcher, apply, parallel apply, tablesync
    relation: str  # schema.table on the target
    slot: str  # on the publisher
    xid: int  # of the remote transaction
    finish_lsn: Lsn  # of its commit or prepare record: what SKIP takes
    conflict_type: str  # PostgreSQL's names
    error_class: str  # our class of error
    sqlstate: str  # its five characters


@dataclass(frozen=True, slots=True)
class Parts:
    """The words of one record, as PostgreSQL divides them. None and empty: no such line."""

    message: str
    detail: str | None = None
    hint: str | None = None
    context: tuple[str, ...] = ()

    def redacted(self) -> Parts:
        """The same without passwords of connection strings."""
        detail, hint = (text and redact(text) for text in (self.detail, self.hint))
        return Parts(redact(self.message), detail, hint, tuple(map(redact, self.context)))


_bound: ContextVar[LogKeys | None] = ContextVar("subscriber_telemetry", default=None)


@contextmanager
def bound(**keys: Unpack[LogKeys]) -> Iterator[None]:
    """Add `keys` to every record of this task, and of tasks it starts, until the block ends."""
    outer = _bound.get() or LogKeys()
    token = _bound.set({**outer, **keys})
    try:
        yield
    finally:
        _bound.reset(token)


def log(
    level: int,
    message: str,
    *,
    detail: str | None = None,
    hint: str | None = None,
    context: Iterable[str] = (),
    exact_detail: str | None = None,
    **keys: Unpack[LogKeys],
) -> None:
    """Write one record.

    `exact_detail` is `detail` as PostgreSQL words it, row values and all; None when it has none.
    `context` are lines from the inside out. Keys given here win over bound ones.
    """
    if logger.isEnabledFor(level):
        parts = Parts(message, detail, hint, tuple(context))
        exact = parts if exact_detail is None else Parts(message, exact_detail, hint, parts.context)
        _write(level, parts, exact, keys)


_following: int | None = None  # the level that was configured, where our log follows the target's; None: it does not


def follow_servers(level: int | None) -> None:
    """From now on the target's log_min_messages counts, at least `level`; None: it does not count."""
    global _following  # noqa: PLW0603  one log for each process
    _following = level


def follow_server(log_min_messages: str) -> None:
    """The target has this log_min_messages now."""
    if _following is not None:
        logger.setLevel(DEBUG if log_min_messages.startswith("debug") else _following)


def log_error(error: BaseException, level: int = ERROR, **keys: Unpack[LogKeys]) -> None:
    """Write an error with all its parts, a group's members one by one; a traceback only for bugs."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            log_error(member, level, **keys)
        return
    found = LogKeys(error_class=type(error).__name__)
    if isinstance(error, SubscriberError):
        found["sqlstate"] = error.sqlstate
        detail = error.exact_detail if isinstance(error, ConflictError) else error.detail
        exact = Parts(error.message, detail, error.hint, tuple(error.context))
        _write(level, _without_values(error, exact), exact, {**found, **keys})
    else:
        parts = Parts(f"unexpected error: {error!r}", hint="This is a bug in subscriber; please report it.")
        _write(level, parts, parts, {**found, **keys}, error)


def _write(level: int, parts: Parts, exact: Parts, keys: LogKeys, bug: BaseException | None = None) -> None:
    everything = {**(_bound.get() or {}), **keys}
    parts, exact = parts.redacted(), exact.redacted()
    message = printable(parts.message)  # for handlers that know nothing of parts
    logger.log(level, "%s", message, extra={"parts": parts, "exact": exact, "keys": everything}, exc_info=bug)


def _without_values(error: SubscriberError, exact: Parts) -> Parts:
    """What a server's error says without the rows it is about; errors of ours have no values.

    Values stand in DETAIL (`Key (id)=(1) already exists.`), in the CONTEXT of COPY and of parameters,
    and, between double quotes, in the messages of data exceptions (SQLSTATE class 22).
    """
    if isinstance(error, ConflictError):
        return Parts(exact.message, error.detail, exact.hint, exact.context)
    if not isinstance(error, ServerError):
        return exact
    message = exact.message
    if error.sqlstate.startswith(CLASS_DATA_EXCEPTION):
        message = re.sub(r'".*"', '"…"', message, flags=re.DOTALL)
    where = error.fields.get("W")
    context = tuple(_server_context(line) if line == where else line for line in exact.context)
    return Parts(message, None, exact.hint, context)


def _server_context(where: str) -> str:
    """The CONTEXT a server sent, without the line COPY stood at and without parameters."""
    where = re.sub(r'(COPY [^\n]*?, line \d+(?:, column [^\n]*?)?): ".*"', r"\1", where, flags=re.DOTALL)
    return re.sub(r"((?:parameter \$\d+|parameters:)[^\n=]*=?).*", r"\1 …", where, flags=re.DOTALL)
