"""SubscriberError and its subclasses, and the action that repairs each error.

    SubscriberError
    ├── ProtocolError        damaged bytes, or a message out of order: reconnect once, then report
    ├── ConninfoError        an invalid connection string: correct it
    ├── ConnectionLost       a server cannot be reached, or the connection is lost: retry later
    │   ├── EndOfStream      the publisher has ended the stream
    │   └── TargetLost       the target of a mirror cannot be reached, or the connection to it is lost
    ├── ServerError          a server answered with an ErrorResponse; its fields are attributes
    │   └── BinaryRefused    the publisher cannot send a value in binary: request text
    ├── StatementError       a SUBSCRIPTION statement is wrong or rejected: correct it
    ├── CatalogMoved         the subscriptions belong to another database: confirm the move, or remove them
    ├── StaleCatalog         a statement has changed the subscription while a worker started: read it again
    ├── TableChanged         a table was dropped, rewritten, altered or locked during a comparison: compare it again
    ├── PublisherError       the publisher cannot serve this subscription: stop, repair
    │   ├── SlotLost         the replication slot is dropped or invalidated: new slot and new copy
    │   ├── PublisherReplaced  another cluster, or one behind the progress, answers at that address
    │   └── TargetBehind     the target has lost confirmed transactions: new copy, or continue with a gap
    ├── ChangeLogError       the change log cannot be opened, read or written: correct that, and start again
    │   ├── ChangeLogDamaged  a file of the log is damaged or missing: restore it from a copy, or start a new log
    │   └── TransactionTooLarge  a transaction does not fit into an object store: archive to a directory
    ├── SpoolError           a file of the spool cannot be created, read or written: repair the folder
    │   └── SpoolFull        no space for a streamed transaction: more disk, a higher limit, or streaming = off
    ├── SubscriptionFailed   a wait cannot end, because a worker has failed: do what its hint says
    ├── WaitTimeout          a wait has not ended in time: see what it waited for, and wait again
    ├── SequenceSyncError    some sequences cannot be set: the detail names them, with the reason
    └── ApplyError           a change cannot be applied: repair the target, or skip the transaction
        ├── LoadNeeded       a change of a lake's table cannot be followed: load the table again
        ├── MappingError     the target has no table, column or identity for a change
        │   └── HookError    a hook does not fit its table, or has failed: correct it
        │       └── HooksMissing  a program without the hooks runs the subscription: run the program that has them
        ├── ConflictError    a conflict that no policy resolves
        ├── LateConflict     a conflicting row was written after the check: retry, nothing is wrong
        ├── StaleMapping     the definition of the target's table has changed: map it again, nothing is wrong
        └── TextNeeded       binary values that the types do not allow: request text, nothing is wrong

Other modules define subclasses with data of their own: StatementSyntaxError (catalog/grammar/lexer.py),
PublisherUnreachable (catalog/commands/publisher_connection.py), ConnectError (connection/errors.py) and ServersError
(demo/servers.py). The exception TornBlock (changelog/segment.py) is no SubscriberError. The package that raises it
catches it. Wrong arguments raise TypeError and ValueError.

A message is one line without a full stop. A detail states facts in whole sentences. A hint advises the operator. It is
the text of a Remedy (remedy.py), which has the next command as a field of its own. The messages, details and hints of
this package contain no values of rows; a ServerError has the server's own text. Passwords of connection strings are
hidden (redaction.py). Callers append lines to `context`, which are printed as CONTEXT lines, as in PostgreSQL.
"""

from __future__ import annotations

from typing import Self

from subscriber.display import shortened
from subscriber.redaction import redact
from subscriber.remedy import Remedy, command_of, hint_of
from subscriber.sqlstate import (
    CONNECTION_FAILURE,
    DATA_CORRUPTED,
    DISK_FULL,
    INTERNAL_ERROR,
    IO_ERROR,
    NUMERIC_VALUE_OUT_OF_RANGE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    PROGRAM_LIMIT_EXCEEDED,
    PROTOCOL_VIOLATION,
    QUERY_CANCELED,
    SERIALIZATION_FAILURE,
    SYNTAX_ERROR,
    UNDEFINED_FUNCTION,
    UNDEFINED_OBJECT,
    UNIQUE_VIOLATION,
)


def _remedy(hint: str | Remedy | None) -> Remedy | None:
    remedy = Remedy.of(hint)
    return None if remedy is None else remedy.map(redact)


class SubscriberError(Exception):
    """An error with the parts of PostgreSQL's own errors.

    Attributes:
        message: one line.
        detail: facts, in sentences. None: there are none.
        remedy: what to do, with the next command and another way. None: nothing is known.
        sqlstate: five characters. Class and SQLSTATE decide the reaction of a worker (retry.py).
        context: lines, the innermost first.
        finish_lsn: the finish LSN of the transaction that could not be applied. None: the error is of none.
        xid: the publisher's number of that transaction. None: as `finish_lsn`, or it is not known.
        relation: the target's table, as schema.table. None: the error is of none.
    """

    sqlstate = INTERNAL_ERROR

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | Remedy | None = None,
        sqlstate: str | None = None,
    ) -> None:
        """Create the error. `hint` is advice in sentences, or a remedy with commands. None: there is none."""
        self.message = redact(shortened(message))
        super().__init__(self.message)
        self.detail = redact(shortened(detail)) if detail else detail
        self.remedy = _remedy(hint)
        self.context: list[str] = []
        self.finish_lsn: int | None = None
        self.xid: int | None = None
        self.relation: str | None = None
        if sqlstate is not None:
            self.sqlstate = sqlstate

    def amend(self, message: str | None = None, *, detail: str | None = None, hint: str | Remedy | None = None) -> Self:
        """Replace parts of the error, because the caller knows more about it. Returns the error.

        Args:
            message: None: it stays.
            detail: None: it stays. Empty: there is none.
            hint: None: the remedy stays.
        """
        if message is not None:
            self.message = redact(shortened(message))
        if detail is not None:
            self.detail = redact(shortened(detail)) if detail else None
        if hint is not None:
            self.remedy = _remedy(hint)
        return self

    def locate(self, relation: str | None, xid: int | None, finish_lsn: int | None) -> Self:
        """Say which change could not be applied: its table, and its transaction. Returns the error."""
        self.relation, self.xid, self.finish_lsn = relation, xid, finish_lsn
        return self

    @property
    def hint(self) -> str | None:
        """The remedy as text, with its commands. None: there is none."""
        return hint_of(self.remedy)

    @property
    def command(self) -> str | None:
        """The exact next command. None: there is none."""
        return command_of(self.remedy)

    @property
    def alternative(self) -> Remedy | None:
        """Another way than the next command. None: there is none."""
        return None if self.remedy is None else self.remedy.alternative

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"DETAIL:  {self.detail}")
        if self.remedy is not None:
            lines.append(f"HINT:  {self.hint}")
        lines += [f"CONTEXT:  {line}" for line in self.context]
        return "\n".join(lines)


class ProtocolError(SubscriberError):
    """The bytes of the replication protocol are damaged, or a message is out of order."""

    sqlstate = PROTOCOL_VIOLATION


class ConninfoError(SubscriberError):
    """A connection string is invalid, or has an option that is not supported."""

    sqlstate = SYNTAX_ERROR


class ConnectionLost(SubscriberError):
    """A server cannot be reached, or the connection to it is lost."""

    sqlstate = CONNECTION_FAILURE


class EndOfStream(ConnectionLost):
    """The publisher has ended the change stream, because it shuts down or because a client requested it."""


class TargetLost(ConnectionLost):
    """The target of a mirror cannot be reached, or the connection to it is lost."""


class ServerError(SubscriberError):
    """An ErrorResponse of a server. `fields` maps the protocol's one-letter codes to text."""

    def __init__(self, fields: dict[str, str]) -> None:
        fields = {code: redact(shortened(text)) for code, text in fields.items()}
        super().__init__(
            fields.get("M", "the server reported an error without a message"),
            detail=fields.get("D"),
            hint=fields.get("H"),
            sqlstate=fields.get("C", INTERNAL_ERROR),
        )
        self.fields = fields
        self.severity = fields.get("V", fields.get("S", "ERROR"))
        if where := fields.get("W"):
            self.context.append(where)


class BinaryRefused(ServerError):
    """A function does not exist that the publisher needs for a value in binary format. Text may need none.

    `reason` is the server's message.
    """

    def __init__(self, fields: dict[str, str], reason: str) -> None:
        super().__init__(fields)
        self.reason = reason


class StatementError(SubscriberError):
    """A SUBSCRIPTION statement is wrong or rejected."""

    sqlstate = SYNTAX_ERROR


class PublisherError(SubscriberError):
    """The publisher cannot serve this subscription, and a retry does not help."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class SlotLost(PublisherError):
    """The replication slot is dropped or invalidated. A new slot and a new copy are needed."""

    sqlstate = UNDEFINED_OBJECT


class PublisherReplaced(PublisherError):
    """Another cluster, or one that is behind the subscription's progress, answers at the publisher's address."""


class TargetBehind(PublisherError):
    """The target is in an older state than the one that was confirmed to the publisher. A new copy is needed."""


class CatalogMoved(SubscriberError):
    """The database was moved, restored or copied, or its server was promoted, and no user has confirmed that yet."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class StaleCatalog(SubscriberError):
    """A statement has changed the subscription while a worker was starting."""

    sqlstate = SERIALIZATION_FAILURE


class TableChanged(SubscriberError):
    """A table was dropped, rewritten, altered or locked while it was compared. Other tables can be compared."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class SpoolError(SubscriberError):
    """A file of the spool, or its folder, cannot be created, read or written."""

    sqlstate = IO_ERROR


class SpoolFull(SpoolError):
    """The spool has no space for the rest of a streamed transaction, because of its limit or the disk."""

    sqlstate = DISK_FULL


class ChangeLogError(SubscriberError):
    """The change log cannot be opened, read or written, or does not have the requested range."""

    sqlstate = IO_ERROR


class ChangeLogDamaged(ChangeLogError):
    """A file of the change log is damaged, missing, or part of another log. A retry does not help."""

    sqlstate = DATA_CORRUPTED


class TransactionTooLarge(ChangeLogError):
    """A transaction cannot be stored in the change log, because its storage has a limit. A retry does not help."""

    sqlstate = PROGRAM_LIMIT_EXCEEDED


class SequenceSyncError(SubscriberError):
    """Some sequences of a subscription cannot be synchronized."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class SubscriptionFailed(SubscriberError):
    """A worker of a subscription has an error that a retry alone cannot solve. The worker has logged the error.

    Attributes:
        subscription: the name of the subscription.
        table: `schema.table` on the target. None: the apply worker has failed.
    """

    def __init__(
        self, subscription: str, table: str | None, message: str, *, hint: str | Remedy | None, sqlstate: str | None
    ) -> None:
        where = f'subscription "{subscription}"' if table is None else f'subscription "{subscription}", table {table}'
        super().__init__(f"{where}: {message}", hint=hint, sqlstate=sqlstate or INTERNAL_ERROR)
        self.subscription = subscription
        self.table = table


class WaitTimeout(SubscriberError, TimeoutError):
    """A wait has not ended within its timeout. The message says what it waited for."""

    sqlstate = QUERY_CANCELED


class ApplyError(SubscriberError):
    """A change cannot be applied to the target."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class ValueUnsupported(ApplyError):
    """A value that the Arrow type of its column cannot hold. `column` is its label."""

    sqlstate = NUMERIC_VALUE_OUT_OF_RANGE

    def __init__(self, message: str, *, column: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.column = column


class LoadNeeded(ApplyError):
    """The rows of a table of the lake do not follow from the change log. A load from the publisher makes it right."""


class MappingError(ApplyError):
    """The target has no table, column or identity that a change needs."""


class HookError(MappingError):
    """A hook of the embedding program does not fit its table, or has failed."""


class HooksMissing(HookError):
    """The subscription has hooks, and this program does not have them."""

    sqlstate = UNDEFINED_FUNCTION


class ConflictError(ApplyError):
    """A conflict that no policy resolves. `exact_detail` contains the values of the rows."""

    sqlstate = UNIQUE_VIOLATION

    def __init__(self, message: str, *, detail: str, exact_detail: str, conflict_type: str) -> None:
        """Create the error.

        Args:
            message: as PostgreSQL words it.
            detail: without values of rows.
            exact_detail: as PostgreSQL words it, with values of rows.
            conflict_type: PostgreSQL's name of the conflict type, for example "insert_exists".
        """
        super().__init__(message, detail=detail)
        self.conflict_type = conflict_type
        self.exact_detail = exact_detail


class LateConflict(ApplyError):
    """A conflicting row was written after the worker had checked for conflicts. The retry resolves the conflict."""


class StaleMapping(ApplyError):
    """The definition of the target's table has changed, or may have, since the worker read it."""


class TextNeeded(ApplyError):
    """Binary format was chosen automatically, and a table's types do not allow it or are faster as text."""
