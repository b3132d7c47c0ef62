"""The options of ALTER SUBSCRIPTION … QUARANTINE. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.catalog.grammar.options import boolean, position
from subscriber.catalog.grammar.parser import AlterQuarantine
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

_NAMES = {
    "retry": frozenset({"lsn"}),
    "discard": frozenset({"lsn"}),
    "edit": frozenset({"lsn", "change", "column", "value", "null", "discard"}),
}


@dataclass(frozen=True, slots=True)
class QuarantineOptions:
    """The options of a statement. An edit discards the change if `column` is None. Otherwise it sets the column."""

    lsn: Lsn | None = None  # None: all transactions
    change: int = 0  # number of the change in its transaction, from 1
    column: str | None = None
    value: str | None = None  # None: NULL


def parse_quarantine_options(statement: AlterQuarantine) -> QuarantineOptions:
    """Return the options of a statement.

    Raises:
        StatementError: an option is unknown, missing or does not fit the others.
    """
    given = {}
    for option in statement.options:
        if option.name not in _NAMES[statement.action]:
            raise StatementError(f'unrecognized subscription parameter: "{option.name}"')
        if option.name in given:
            raise StatementError("conflicting or redundant options")
        given[option.name] = option
    if "lsn" not in given:
        if statement.action == "retry":
            return QuarantineOptions()
        raise _wrong(statement, "lsn is required")
    lsn = position(given["lsn"])
    if statement.action != "edit":
        return QuarantineOptions(lsn)
    change = given["change"].value if "change" in given else None
    if not isinstance(change, int) or change < 1:
        raise _wrong(statement, "change is required, the number of a change from 1 on")
    if "discard" in given and boolean(given["discard"]):
        if given.keys() & {"column", "value", "null"}:
            raise _wrong(statement, "discard excludes column, value and null")
        return QuarantineOptions(lsn, change)
    is_null = "null" in given and boolean(given["null"])
    if "column" not in given or is_null == ("value" in given):
        raise _wrong(statement, "column is required, with value or null")
    column, value = given["column"].value, given["value"].value if "value" in given else None
    if column is None or (value is None and not is_null):
        raise _wrong(statement, "column and value require a parameter")
    return QuarantineOptions(lsn, change, str(column), None if is_null else str(value))


def _wrong(statement: AlterQuarantine, why: str) -> StatementError:
    return StatementError(
        f"invalid options of ALTER SUBSCRIPTION ... QUARANTINE {statement.action.upper()}: {why}",
        sqlstate=INVALID_PARAMETER_VALUE,
    )
