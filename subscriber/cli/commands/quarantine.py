"""`subscriber quarantine`: list, show, retry, discard and edit transactions in quarantine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.privileges import get_owned_subscription
from subscriber.catalog.commands.quarantine import not_in_quarantine
from subscriber.catalog.commands.quarantine_edit import Change, numbered
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import quarantine as store
from subscriber.catalog.store.quarantine import QuarantinedTransaction
from subscriber.change_stream.types.registry import Types
from subscriber.cli.change_lines import ChangeLines, as_text
from subscriber.cli.commands.exec import print_message
from subscriber.cli.quarantine_action import Action
from subscriber.display import json_text, printable, shell_word, sql_identifier, sql_literal
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Message, Relation, Truncate, Update
from subscriber.protocol.tuple_data import BINARY, TEXT, TupleData
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, INVALID_TEXT_REPRESENTATION

_TYPES = Types()


async def run_quarantine(
    target: str,
    action: Action,
    name: str,
    lsn: str | None,
    *,
    change: int | None,
    column: str | None,
    value: str | None,
    cascade: bool,
    json: bool,
) -> int:
    """Run an action. Returns the exit status: 1 if `list` has found transactions."""
    async with CatalogConnection.open(target, "subscriber quarantine") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        await ensure_schema(connection)
        subscription = await get_owned_subscription(connection, name)
        if action in (Action.RETRY, Action.DISCARD, Action.EDIT):
            statement = _statement(action, name, lsn, change=change, column=column, value=value, cascade=cascade)
            await execute(connection, statement, notice=_notice)
            return 0
        parked = await store.load(connection, subscription.oid)
        if action is Action.LIST:
            for one in parked:
                print(json_text(_row(one)) if json else printable(_line(one)))
            if parked and not json:
                print(f"\nRepair the cause, then: subscriber quarantine retry {shell_word(name)}")
            return int(bool(parked))
        wanted = _position(_required(action, lsn), name)
        if wanted not in {one.finish_lsn for one in parked}:
            raise not_in_quarantine(wanted, name)
        one = next(one for one in parked if one.finish_lsn == wanted)
        if not json:
            for line in _description(one):
                print(printable(line))
        lines, place = _NumberedLines(), 0
        while True:
            messages, place = await store.read_messages(connection, subscription.oid, wanted, place)
            if not messages:
                return 0
            for text in lines.of(messages, json=json):
                print(text)


def _notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
    print_message(severity, message, detail, hint, sys.stderr)


def _position(text: str, name: str) -> Lsn:
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise StatementError(
            str(error),
            hint="An LSN has the form 16/B374D848. List those in quarantine: "
            f"subscriber quarantine list {shell_word(name)}",
            sqlstate=INVALID_TEXT_REPRESENTATION,
        ) from None


def _required(action: Action, lsn: str | None) -> str:
    if lsn is None:
        raise StatementError(
            f"{action} needs the position of a transaction",
            hint="subscriber quarantine list NAME prints the positions.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return lsn


def _statement(
    action: Action,
    name: str,
    lsn: str | None,
    *,
    change: int | None,
    column: str | None,
    value: str | None,
    cascade: bool,
) -> str:
    """Return the statement that the action stands for."""
    words = f"ALTER SUBSCRIPTION {sql_identifier(name)} QUARANTINE {action.upper()}"
    if action is Action.RETRY and lsn is None:
        return words
    options = [f"lsn = {sql_literal(_required(action, lsn))}"]
    if action is Action.EDIT:
        options.append(f"change = {change or 0}")
        if column is None:
            options.append("discard")
        else:
            options.append(f"column = {sql_literal(column)}")
            options.append("null" if value is None else f"value = {sql_literal(value)}")
    return f"{words} ({', '.join(options)}){' CASCADE' * cascade}"


def _line(one: QuarantinedTransaction) -> str:
    if one.error is not None:
        reason = one.error
    else:
        reason = f"depends on {', '.join(str(lsn) for lsn in sorted(one.depends_on))}"
    retry = ", is being retried" if one.retry else ""
    return f"{one.finish_lsn}  {one.changes} changes of {', '.join(one.relations)}: {reason}{retry}"


def _description(one: QuarantinedTransaction) -> list[str]:
    lines = [f"transaction {one.xid}, finished at {one.finish_lsn}, committed {one.commit_time}, parked {one.parked}"]
    if one.error is not None:
        lines.append(f"error: {one.error}")
    if one.error_detail is not None:
        lines.append(f"detail: {one.error_detail}")
    if one.depends_on:
        lines.append(f"depends on: {', '.join(str(lsn) for lsn in sorted(one.depends_on))}")
    return [*lines, f"failed retries: {one.attempts}, edits: {one.edited}"]


def _row(one: QuarantinedTransaction) -> dict[str, Any]:
    return {
        "lsn": str(one.finish_lsn),
        "xid": one.xid,
        "commit_time": None if one.commit_time is None else one.commit_time.isoformat(),
        "parked": one.parked.isoformat(),
        "tables": list(one.relations),
        "changes": one.changes,
        "bytes": one.bytes,
        "depends_on": [str(lsn) for lsn in sorted(one.depends_on)],
        "error": one.error,
        "error_detail": one.error_detail,
        "attempts": one.attempts,
        "retry": one.retry,
        "edited": one.edited,
    }


class _NumberedLines:
    """Formats the changes of one transaction, with the numbers that an edit takes."""

    def __init__(self) -> None:
        self._lines = ChangeLines()
        self._relations: dict[int, Relation] = {}
        self._number = 0

    def of(self, messages: list[bytes], *, json: bool) -> list[str]:
        """Return a line for each change of some messages."""
        found = []
        for message, _ in numbered(messages, self._relations):
            line = self._lines.line(_in_text(message, self._relations))
            if line is None:
                continue
            self._number += 1
            line.pop("xid")
            found.append(json_text({"change": self._number, **line}) if json else f"{self._number:4}  {as_text(line)}")
        return found


def _in_text(message: Message, relations: dict[int, Relation]) -> Message:
    """Return a change with its binary values as text."""
    if not isinstance(message, Change) or isinstance(message, Truncate):
        return message
    relation = relations[message.relid]
    match message:
        case Insert():
            return replace(message, new=_row_in_text(message.new, relation))
        case Delete():
            return replace(message, old=_row_in_text(message.old, relation))
        case Update():
            old = None if message.old is None else _row_in_text(message.old, relation)
            return replace(message, old=old, new=_row_in_text(message.new, relation))


def _row_in_text(row: TupleData, relation: Relation) -> TupleData:
    status, values = row.split()
    kinds = bytearray(status)
    for at, column in enumerate(relation.columns):
        value = values[at]
        if kinds[at] == BINARY and value is not None:
            kinds[at], values[at] = TEXT, _text(column.type_oid, value)
    return TupleData.join(bytes(kinds), values)


def _text(oid: int, value: bytes) -> bytes:
    try:
        decoded = _TYPES.get(oid).binary(value)
    except (ValueError, ArithmeticError):
        decoded = value
    return (rf"\x{decoded.hex()}" if isinstance(decoded, bytes) else str(decoded)).encode()
