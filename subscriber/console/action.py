"""ConsoleAction: a change that a person requests on the page, parsed from JSON. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from subscriber.comparison.progress import ComparisonProgress
from subscriber.display import sql_identifier
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy

MOST_TABLES = 1000  # of one repair


class ActionName(StrEnum):
    """The actions."""

    ENABLE = "enable"
    DISABLE = "disable"
    SKIP = "skip"
    REFRESH = "refresh"
    RETRY = "retry"  # transactions in quarantine
    VERIFY = "verify"
    REPAIR = "repair"
    CANCEL = "cancel"  # the comparison or repair that runs


# The actions that take longer than a request.
TASKS = (ActionName.VERIFY, ActionName.REPAIR)


@dataclass(frozen=True, slots=True)
class ConsoleAction:
    """One action.

    Attributes:
        name: the action.
        subscription: the subscription.
        lsn: the transaction to skip, or to retry. None: all that are in quarantine.
        tables: the tables to repair, as schema.table. Empty: all.
    """

    name: ActionName
    subscription: str
    lsn: Lsn | None = None
    tables: tuple[str, ...] = ()

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ConsoleAction:
        """Parse the body of a request.

        Raises:
            ValueError: it is not an action. The message has none of its values.
        """
        if unknown := document.keys() - {"action", "subscription", "lsn", "tables"}:
            raise ValueError(f"an action has no keys but action, subscription, lsn and tables: {len(unknown)} more")
        try:
            name = ActionName(str(document.get("action")))
        except ValueError:
            raise ValueError(f"action is one of {', '.join(ActionName)}") from None
        subscription, lsn, tables = document.get("subscription"), document.get("lsn"), document.get("tables", [])
        if not isinstance(subscription, str) or not subscription:
            raise ValueError("subscription is the name of a subscription")
        if lsn is not None and name not in (ActionName.SKIP, ActionName.RETRY):
            raise ValueError("lsn belongs to skip and retry")
        if lsn is None and name is ActionName.SKIP:
            raise ValueError("skip needs lsn")
        if tables and name is not ActionName.REPAIR:
            raise ValueError("tables belongs to repair")
        if (
            not isinstance(tables, list)
            or len(tables) > MOST_TABLES
            or not all(isinstance(table, str) for table in tables)
        ):
            raise ValueError(f"tables is a list of at most {MOST_TABLES} names")
        return cls(name, subscription, None if lsn is None else _lsn(lsn), tuple(tables))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments as a JSON value."""
        given: dict[str, Any] = {}
        if self.lsn is not None:
            given["lsn"] = str(self.lsn)
        if self.tables:
            given["tables"] = list(self.tables)
        return given

    @property
    def statement(self) -> str:
        """The statement of an action that is not one of TASKS."""
        place = "" if self.lsn is None else f" (lsn = '{self.lsn}')"
        forms = {
            ActionName.ENABLE: "ENABLE",
            ActionName.DISABLE: "DISABLE",
            ActionName.SKIP: f"SKIP{place}",
            ActionName.REFRESH: "REFRESH PUBLICATION",
            ActionName.RETRY: f"QUARANTINE RETRY{place}",
        }
        return f"ALTER SUBSCRIPTION {sql_identifier(self.subscription)} {forms[self.name]}"


@dataclass(frozen=True, slots=True)
class TaskState:
    """The comparison or repair that runs, or the last one. `result` is None while it runs."""

    action: ConsoleAction
    who: str
    began: datetime
    progress: ComparisonProgress
    result: str | None = None
    remedy: Remedy | None = None
    summary: Mapping[str, Any] | None = None


def _lsn(text: Any) -> Lsn:
    try:
        return Lsn.parse(text)
    except (ValueError, TypeError, AttributeError):
        raise ValueError("lsn is a position such as 0/15E8A90") from None
