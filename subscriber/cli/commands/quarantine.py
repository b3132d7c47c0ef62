"""`subscriber quarantine`: list, show, retry, discard and edit transactions in quarantine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber.cli.dsn import Target
from subscriber.cli.messages import print_message
from subscriber.cli.options import Json, Name
from subscriber.display import json_text, printable, shell_word, sql_identifier, sql_literal
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, INVALID_TEXT_REPRESENTATION

if TYPE_CHECKING:
    from subscriber.catalog.store.quarantine import QuarantinedTransaction


class Action(StrEnum):
    """The actions of the command."""

    LIST = "list"
    SHOW = "show"
    RETRY = "retry"
    DISCARD = "discard"
    EDIT = "edit"


async def quarantine_(
    target: Target,
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    name: Name,
    lsn: Annotated[
        str | None, typer.Argument(help="The transaction, by its position.", metavar="[LSN]", show_default=False)
    ] = None,
    change: Annotated[int | None, typer.Option(help="edit: the number of the change.", min=1)] = None,
    column: Annotated[
        str | None, typer.Option(help="edit: set this column. Without it, the change is discarded.", metavar="NAME")
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="edit: the value of the column. Default: NULL.", show_default=False)
    ] = None,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="discard: also the transactions that depend on it.")
    ] = False,
    json: Json = False,
) -> int:
    """List, show, retry, discard and edit transactions in quarantine.

    `list` prints the transactions and exits 1 if there are any. `show` prints the changes of one, with their numbers.
    `retry` has the worker apply all transactions in order, or one and those that depend on it. The statement
    ALTER SUBSCRIPTION ... QUARANTINE does the same.
    """
    from subscriber.catalog.commands.execute import execute
    from subscriber.catalog.commands.privileges import get_owned_subscription
    from subscriber.catalog.commands.quarantine import not_in_quarantine
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.identity import refuse_standby
    from subscriber.catalog.schema import ensure_schema
    from subscriber.catalog.store import quarantine as store
    from subscriber.cli.quarantine_lines import NumberedLines

    async with CatalogConnection.open(target, "subscriber quarantine") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        await ensure_schema(connection)
        subscription = await get_owned_subscription(connection, name)
        if action in (Action.RETRY, Action.DISCARD, Action.EDIT):
            statement = _statement(action, name, lsn, change=change, column=column, value=value, cascade=cascade)
            await execute(connection, statement, notice=print_message)
            return 0
        parked = await store.load(connection, subscription.oid)
        if action is Action.LIST:
            for transaction in parked:
                print(json_text(_row(transaction)) if json else printable(_line(transaction)))
            if parked and not json:
                print(f"\nRepair the cause, then: subscriber quarantine retry {shell_word(name)}")
            return int(bool(parked))
        wanted = _position(_required(action, lsn), name)
        if wanted not in {row.finish_lsn for row in parked}:
            raise not_in_quarantine(wanted, name)
        transaction = next(row for row in parked if row.finish_lsn == wanted)
        if not json:
            for line in _description(transaction):
                print(printable(line))
        lines, place = NumberedLines(), 0
        while True:
            messages, place = await store.read_messages(connection, subscription.oid, wanted, place)
            if not messages:
                return 0
            for text in lines.of(messages, json=json):
                print(text)


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
