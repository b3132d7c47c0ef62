"""Every error this package raises on purpose, and what its reader can do about it.

    SubscriberError
    ├── ProtocolError        the bytes are damaged, or came out of order: reconnect once, then report
    ├── ConninfoError        a connection string cannot be understood: correct it
    ├── ConnectionLost       a server could not be reached, or went away: try again later
    │   └── EndOfStream      the publisher ended the stream in good order
    ├── ServerError          a server answered with an ErrorResponse; its fields are attributes
    ├── StatementError       a SUBSCRIPTION statement is wrong or refused: correct it
    ├── CatalogMoved         the subscriptions belong to another database: confirm the move, or remove them
    ├── StaleCatalog         a statement has changed the subscription while a worker started: read it again
    ├── PublisherError       the publisher can never serve this subscription as it stands: stop, repair
    │   ├── SlotLost         the replication slot is gone or invalidated: new slot and new copy
    │   ├── PublisherReplaced  another cluster, or one behind our progress, answers at that address
    │   └── TargetBehind     the target has lost what was confirmed: new copy, or go on with a gap
    ├── ChangeLogError       the change log cannot be opened, read or written: correct that, and start again
    │   └── ChangeLogDamaged  a file of the log is damaged or missing: restore it from a copy, or begin a new log
    ├── SpoolError           a file of the spool cannot be made, read or written: repair the folder
    │   └── SpoolFull        no room for a streamed transaction: more disk, a higher limit, or streaming = off
    └── ApplyError           a change cannot be applied: repair the target, or skip the transaction
        ├── MappingError     the target has no table, column or identity for a change
        │   └── HookError    a hook of the program cannot be right for its table, or failed: correct it
        │       └── HooksMissing  a subscription with hooks is run by a program without: run the right one
        ├── ConflictError    a row of the target is in the way of a change
        ├── LateConflict     a row came into the way after it was looked for: look again, nothing is wrong
        ├── StaleMapping     the target's table changed its shape under us: map again, nothing is wrong
        └── TextNeeded       values come in binary, which their types do not allow: ask for text, nothing is wrong

A message is one line without a full stop; a detail states facts in whole sentences; a hint says what
the operator can do. None of ours carries a row value, and none shows a password of a connection string (redaction.py).
`context` grows on the way up and is printed as CONTEXT lines, as PostgreSQL prints them.
"""

from __future__ import annotations

from subscriber.redaction import redact
from subscriber.sqlstate import (
    CONNECTION_FAILURE,
    DATA_CORRUPTED,
    DISK_FULL,
    INTERNAL_ERROR,
    IO_ERROR,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    PROTOCOL_VIOLATION,
    SERIALIZATION_FAILURE,
    SYNTAX_ERROR,
    UNDEFINED_FUNCTION,
    UNDEFINED_OBJECT,
    UNIQUE_VIOLATION,
)


class SubscriberError(Exception):
    """An error with the parts PostgreSQL's own errors have.

    `sqlstate` is five characters and decides how a worker goes on (worker/retry.py);
    `detail` and `hint` are None when there is nothing to add.
    """

    sqlstate = INTERNAL_ERROR

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        sqlstate: str | None = None,
    ) -> None:
        self.message = redact(message)
        super().__init__(self.message)
        self.detail = redact(detail) if detail else detail
        self.hint = redact(hint) if hint else hint
        self.context: list[str] = []
        if sqlstate is not None:
            self.sqlstate = sqlstate

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"DETAIL:  {self.detail}")
        if self.hint:
            lines.append(f"HINT:  {self.hint}")
        lines += [f"CONTEXT:  {line}" for line in self.context]
        return "\n".join(lines)


class ProtocolError(SubscriberError):
    """The bytes are damaged, or a message came that may not come now."""

    sqlstate = PROTOCOL_VIOLATION


class ConninfoError(SubscriberError):
    """A connection string cannot be understood, or asks for what we cannot do."""

    sqlstate = SYNTAX_ERROR


class ConnectionLost(SubscriberError):
    """A server could not be reached, or went away."""

    sqlstate = CONNECTION_FAILURE


class EndOfStream(ConnectionLost):
    """The publisher ended the change stream in good order: it is shutting down, or was asked to."""


class ServerError(SubscriberError):
    """An ErrorResponse. `fields` maps the protocol's one-letter codes to text."""

    def __init__(self, fields: dict[str, str]) -> None:
        fields = {code: redact(text) for code, text in fields.items()}
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


class StatementError(SubscriberError):
    """A SUBSCRIPTION statement is wrong, or refused."""

    sqlstate = SYNTAX_ERROR


class PublisherError(SubscriberError):
    """The publisher cannot serve this subscription as it stands; trying again does not help."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class SlotLost(PublisherError):
    """The replication slot is gone or invalidated: a new slot and a new copy are needed."""

    sqlstate = UNDEFINED_OBJECT


class PublisherReplaced(PublisherError):
    """Another cluster, or one that is behind our progress, answers at the publisher's address."""


class TargetBehind(PublisherError):
    """The target has gone back to an older state than the publisher was told of: a new copy is needed."""


class CatalogMoved(SubscriberError):
    """The database was moved, restored or copied, or its server promoted, and no user has confirmed that yet."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class StaleCatalog(SubscriberError):
    """A statement has changed the subscription while a worker was starting."""

    sqlstate = SERIALIZATION_FAILURE


class SpoolError(SubscriberError):
    """A file of the spool, or its folder, cannot be made, read or written."""

    sqlstate = IO_ERROR


class SpoolFull(SpoolError):
    """The spool has no room for the rest of a streamed transaction: its limit, or the disk."""

    sqlstate = DISK_FULL


class ChangeLogError(SubscriberError):
    """The change log cannot be opened, read or written, or has been removed as far as it was asked for."""

    sqlstate = IO_ERROR


class ChangeLogDamaged(ChangeLogError):
    """A file of the change log is damaged, missing, or part of another log; retrying does not help."""

    sqlstate = DATA_CORRUPTED


class ApplyError(SubscriberError):
    """A change cannot be applied to the target."""

    sqlstate = OBJECT_NOT_IN_PREREQUISITE_STATE


class MappingError(ApplyError):
    """The target has no table, column or identity that a change needs."""


class HookError(MappingError):
    """A hook of the embedding program cannot be right for its table, or failed."""


class HooksMissing(HookError):
    """The subscription has hooks, and this program is not the one that has them."""

    sqlstate = UNDEFINED_FUNCTION


class ConflictError(ApplyError):
    """A change is refused because of a row that the target has; `exact_detail` has the rows' values."""

    sqlstate = UNIQUE_VIOLATION

    def __init__(self, message: str, *, detail: str, exact_detail: str, conflict_type: str) -> None:
        """`conflict_type` is one of PostgreSQL's names, as "insert_exists"."""
        super().__init__(message, detail=detail)
        self.conflict_type = conflict_type
        self.exact_detail = exact_detail


class LateConflict(ApplyError):
    """Somebody wrote a row that is in the way of a change after it was looked for; look again, it is decided then."""


class StaleMapping(ApplyError):
    """The target's table has, or may have, another shape than when it was looked at; look again."""


class TextNeeded(ApplyError):
    """Values came in binary though nobody asked for that, and a table's types do not allow it; ask for text."""
