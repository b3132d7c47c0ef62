"""Log records of the package: the parts of PostgreSQL's own log lines, and fixed keys.

    telemetry.log(telemetry.LOG, "logical replication apply worker has started", event="worker.started")

The keys are a TypedDict, so that a type checker finds a misspelled key. A task that works for one subscription or
worker binds these keys: `with telemetry.bound(subscription=…, worker=…):`. Tasks that are started in the block inherit
them. cli/logs.py decides the format and the destination of records.

Invariants.

- The `parts` of a record have no values of rows. PostgreSQL's log has them in the DETAIL of a conflict or of a
  duplicate key. They are in `exact`, which the `postgres` format prints and the other formats do not.
- Neither has passwords of connection strings.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from subscriber.display import is_shortened, printable, shortened
from subscriber.errors import ConflictError, ServerError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.redaction import redact
from subscriber.remedy import Remedy, command_of, hint_of
from subscriber.sqlstate import CLASS_DATA_EXCEPTION

# PostgreSQL's levels, on the standard library's scale.
DEBUG, LOG, WARNING, ERROR, FATAL = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL

logger = logging.getLogger("subscriber")


class LogKeys(TypedDict, total=False):
    """The keys by which a log can be searched. A record has those that apply."""

    event: str  # a name that stays when the message changes: worker.started, apply.conflict, …
    subscription: str  # the name of the subscription
    worker: str  # launcher, apply, parallel apply, tablesync
    relation: str  # schema.table on the target
    slot: str  # on the publisher
    xid: int  # of the remote transaction
    finish_lsn: Lsn  # of the transaction's commit or prepare record, for SKIP
    conflict_type: str  # PostgreSQL's name
    error_class: str  # class of subscriber's error
    sqlstate: str  # five characters


@dataclass(frozen=True, slots=True)
class Parts:
    """The text of one record in PostgreSQL's parts. The record has no line for None or an empty tuple."""

    message: str
    detail: str | None = None
    remedy: Remedy | None = None
    context: tuple[str, ...] = ()

    @property
    def hint(self) -> str | None:
        """The text of the remedy. None: there is none."""
        return hint_of(self.remedy)

    @property
    def command(self) -> str | None:
        """The next command. None: there is none."""
        return command_of(self.remedy)

    def redacted(self) -> Parts:
        """Return the parts without passwords of connection strings. Long parts are shortened."""
        remedy = None if self.remedy is None else self.remedy.map(redact)
        message, *context = (redact(shortened(text)) for text in (self.message, *self.context))
        return Parts(message, self.detail and redact(shortened(self.detail)), remedy, tuple(context))


_bound: ContextVar[LogKeys | None] = ContextVar("subscriber_telemetry", default=None)


@contextmanager
def bound(**keys: Unpack[LogKeys]) -> Iterator[None]:
    """Add `keys` to the records of this task, and of tasks that are started in the block, until its end."""
    outer = _bound.get() or LogKeys()
    token = _bound.set({**outer, **keys})
    try:
        yield
    finally:
        _bound.reset(token)


def bound_keys() -> LogKeys:
    """Return the keys that are bound in this task."""
    return _bound.get() or LogKeys()


def log(
    level: int,
    message: str,
    *,
    detail: str | None = None,
    hint: str | Remedy | None = None,
    context: Iterable[str] = (),
    exact_detail: str | None = None,
    **keys: Unpack[LogKeys],
) -> None:
    """Write one record.

    Args:
        level: DEBUG, LOG, WARNING, ERROR or FATAL.
        message: one line.
        detail: without values of rows.
        hint: advice, or a remedy with commands.
        context: lines, the innermost first.
        exact_detail: `detail` as PostgreSQL words it, with values of rows. None: `detail` is exact.
        keys: take precedence over bound keys.
    """
    if logger.isEnabledFor(level):
        parts = Parts(message, detail, Remedy.of(hint), tuple(context))
        exact = parts if exact_detail is None else Parts(message, exact_detail, parts.remedy, parts.context)
        _write(level, parts, exact, keys)


_following: int | None = None  # the configured level; None: the target's log_min_messages has no effect


def follow_servers(level: int | None) -> None:
    """Let the target's log_min_messages lower the level of this log. `level` applies otherwise. None: stop that."""
    global _following  # noqa: PLW0603  one log for each process
    _following = level


def follow_server(log_min_messages: str) -> None:
    """Apply the target's current log_min_messages, after follow_servers()."""
    if _following is not None:
        logger.setLevel(DEBUG if log_min_messages.startswith("debug") else _following)


def print_events(events: Collection[str]) -> None:
    """Print records of these events, warnings and errors to stderr, unless the process has configured logging."""

    def is_printed(record: logging.LogRecord) -> bool:
        return record.levelno >= WARNING or getattr(record, "keys", {}).get("event") in events

    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.addFilter(is_printed)
        logger.addHandler(handler)
        logger.setLevel(LOG)


def log_error(
    error: BaseException, level: int = ERROR, *, remedy: Remedy | None = None, **keys: Unpack[LogKeys]
) -> None:
    """Write an error with its parts, or each member of an exception group.

    An error that is not a SubscriberError is a bug. Its record has a traceback.

    Args:
        error: the error.
        level: ERROR, or the level of an error that is expected.
        remedy: what to do about an error without a hint. Format `postgres` leaves it out, because PostgreSQL's log has
            none there. None: as the error.
        keys: take precedence over those of the error.
    """
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            log_error(member, level, remedy=remedy, **keys)
        return
    fields = LogKeys(error_class=type(error).__name__)
    if isinstance(error, SubscriberError):
        fields["sqlstate"] = error.sqlstate
        detail = error.exact_detail if isinstance(error, ConflictError) else error.detail
        exact = Parts(error.message, detail, error.remedy, tuple(error.context))
        parts = _without_values(error, exact)
        if parts.remedy is None:
            parts = replace(parts, remedy=remedy)
        _write(level, parts, exact, {**fields, **_place(error), **keys})
    else:
        parts = Parts(f"unexpected error: {error!r}", remedy=Remedy("this is a bug in subscriber; please report it."))
        _write(level, parts, parts, {**fields, **keys}, error)


def parts_without_values(error: SubscriberError) -> Parts:
    """Return the parts of an error without values of rows and without passwords."""
    exact = Parts(error.message, error.detail, error.remedy, tuple(error.context))
    return _without_values(error, exact).redacted()


def message_without_values(error: SubscriberError) -> str:
    """Return the message of an error without values of rows and passwords, for a text of another record."""
    return parts_without_values(error).message


def _write(level: int, parts: Parts, exact: Parts, keys: LogKeys, bug: BaseException | None = None) -> None:
    everything = {**(_bound.get() or {}), **keys}
    parts, exact = parts.redacted(), exact.redacted()
    message = _one_line(parts)  # for handlers that do not read the parts
    logger.log(level, "%s", message, extra={"parts": parts, "exact": exact, "keys": everything}, exc_info=bug)


def _place(error: SubscriberError) -> LogKeys:
    """Return the keys that an error has: its table, its transaction and its conflict type."""
    fields = LogKeys()
    if error.relation is not None:
        fields["relation"] = error.relation
    if error.xid is not None:
        fields["xid"] = error.xid
    if error.finish_lsn is not None:
        fields["finish_lsn"] = Lsn(error.finish_lsn)
    if isinstance(error, ConflictError):
        fields["conflict_type"] = error.conflict_type
    return fields


def _one_line(parts: Parts) -> str:
    """Return all parts on one line, with PostgreSQL's labels."""
    labeled = [("DETAIL", parts.detail), *(("CONTEXT", line) for line in parts.context), ("HINT", parts.hint)]
    texts = [f"{label}: {printable(' '.join(text.splitlines()))}" for label, text in labeled if text]
    return "  ".join([printable(parts.message), *texts])


def _without_values(error: SubscriberError, exact: Parts) -> Parts:
    """Remove values of rows from a server's error. Errors of this package have none.

    Values are in DETAIL (`Key (id)=(1) already exists.`), and in the CONTEXT of COPY and of parameters. Messages of
    data exceptions (SQLSTATE class 22) have them in double quotes.
    """
    if isinstance(error, ConflictError):
        return Parts(exact.message, error.detail, exact.remedy, exact.context)
    if not isinstance(error, ServerError):
        return exact
    message = exact.message
    if error.sqlstate.startswith(CLASS_DATA_EXCEPTION):
        value = '".*' if is_shortened(message) else '".*"'
        message = re.sub(value, '"…"', message, flags=re.DOTALL)
    where = error.fields.get("W")
    context = tuple(_server_context(line) if line == where else line for line in exact.context)
    return Parts(message, None, exact.remedy, context)


def _server_context(where: str) -> str:
    """Return the CONTEXT of a server without the data of COPY and the values of parameters.

    Each pattern has one place at which it can match, for linear time.
    """
    data = '(?s:".*)' if is_shortened(where) else '(?s:".*")'
    where = re.sub(
        rf"^(COPY (?>[^\n]*?: (?=\"))){data}", lambda found: found[1].removesuffix(": "), where, flags=re.MULTILINE
    )
    return re.sub(r"((?:parameter \$\d+|parameters:)[^\n=]*=?).*", r"\1 …", where, flags=re.DOTALL)
