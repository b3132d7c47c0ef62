"""Runs the actions of persons: the SUBSCRIPTION statements, verify() and repair(), each recorded in `subscriber.audit`.

**Invariants.** An action runs only if its row in the audit is committed. One action runs at a time, and one comparison
or repair. A comparison or repair is bounded by TASK_JOBS connections to each server and `console_task_timeout`.

**Failure cases.**

- The process is killed during an action: the statement is a transaction, so it is complete or has had no effect. The
  row in the audit has no end.
- The target does not answer: a statement is given up after ACTION_TIMEOUT, and its transaction rolls back. The row in
  the audit has no end if the target does not take it either.
- The process ends during a comparison or repair: it is canceled, and its row says so. Rows that were repaired remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.privileges import get_owned_subscription
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import audit
from subscriber.comparison.comparison import verify
from subscriber.comparison.progress import ComparisonProgress
from subscriber.comparison.summary import MOST_SHOWN, summary_of
from subscriber.console.action import TASKS, ActionName, ConsoleAction, TaskState
from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.repair.result import Repair
from subscriber.repair.tables import repair
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import OBJECT_IN_USE, QUERY_CANCELED

APPLICATION_NAME = "subscriber console"
ACTION_TIMEOUT = 60.0  # seconds for a statement
AUDIT_TIMEOUT = 10.0  # seconds for the row about the end of an action
TASK_JOBS = 2  # connections to each server


@dataclass(frozen=True, slots=True)
class Person:
    """Who requests an action: the label of the token, and the address of the client."""

    label: str
    address: str


class ActionRunner:
    """Runs the actions on one target.

    Attributes:
        task: the comparison or repair that runs, or the last one. None: there was none.
    """

    def __init__(
        self,
        target: str,
        settings: Settings = DEFAULTS,
        hooks: Mapping[str, Hooks] = MappingProxyType({}),
        apply_target: str | None = None,
    ) -> None:
        """Create a runner.

        Args:
            target: the connection string of the target. Its role owns the subscriptions or is a superuser.
            settings: limits and time-outs.
            hooks: by subscription, the hooks of the launcher's program.
            apply_target: the connection string of the role that applies changes. None: `target`.
        """
        self._target = target
        self._apply_target = apply_target
        self._settings = settings
        self._hooks = hooks
        self._lock = anyio.Lock()
        self._tasks: TaskGroup | None = None
        self._scope = anyio.CancelScope()
        self.task: TaskState | None = None

    async def serve(self) -> None:
        """Run comparisons and repairs in the background until canceled."""
        async with anyio.create_task_group() as self._tasks:
            await anyio.sleep_forever()

    @property
    def is_busy(self) -> bool:
        """Return True while a comparison or repair runs."""
        return self.task is not None and self.task.result is None

    async def run(self, action: ConsoleAction, person: Person) -> list[str]:
        """Run an action, or start it if it takes longer than a request.

        Returns:
            The messages of the statement.

        Raises:
            SubscriberError: the action is not possible. The audit has the error too.

        Cancellation: the transaction of a statement is rolled back.
        """
        if self._lock.statistics().locked:
            raise SubscriberError("another action runs", hint="Repeat it in a moment.", sqlstate=OBJECT_IN_USE)
        async with self._lock:
            if action.name in TASKS and self.is_busy:
                raise SubscriberError(
                    "a comparison or repair runs already",
                    hint="Wait for its end, or cancel it.",
                    sqlstate=OBJECT_IN_USE,
                )
            number = await self._begin(action, person)
            if action.name not in TASKS:
                return await self._run_now(action, person, number)
            if self._tasks is None:
                raise SubscriberError("the console is starting", sqlstate=OBJECT_IN_USE)
            self.task = TaskState(action, person.label, datetime.now(UTC), ComparisonProgress("starting"))
            self._scope = anyio.CancelScope()
            self._tasks.start_soon(self._run_task, action, person, number)
            return []

    async def _begin(self, action: ConsoleAction, person: Person) -> int:
        with anyio.move_on_after(ACTION_TIMEOUT):
            async with CatalogConnection.open(self._target, APPLICATION_NAME) as catalog, catalog.use() as connection:
                await refuse_standby(connection)
                await ensure_schema(connection)
                subscription = await get_owned_subscription(connection, action.subscription)
                return await audit.begin(
                    connection, subscription.oid, person.label, person.address, action.name, action.arguments
                )
        raise _too_late()

    async def _run_now(self, action: ConsoleAction, person: Person, number: int) -> list[str]:
        messages: list[str] = []
        result = "canceled"
        try:
            with anyio.fail_after(ACTION_TIMEOUT):
                if action.name is ActionName.CANCEL:
                    self._cancel()
                else:
                    async with (
                        CatalogConnection.open(self._target, APPLICATION_NAME) as catalog,
                        catalog.use() as connection,
                    ):
                        await execute(
                            connection,
                            action.statement,
                            notice=lambda severity, message, *_: messages.append(f"{severity}:  {message}"),
                            hooks=self._hooks,
                            settings=self._settings,
                        )
            result = audit.DONE
        except TimeoutError:
            raise _too_late() from None
        except SubscriberError as error:
            result = redact(error.message)
            raise
        finally:
            await self._end(action, person, number, result)
        return messages

    def _cancel(self) -> None:
        if not self.is_busy:
            raise SubscriberError("no comparison or repair runs", sqlstate=OBJECT_IN_USE)
        self._scope.cancel()

    async def _run_task(self, action: ConsoleAction, person: Person, number: int) -> None:
        """Run a comparison or repair. No error leaves this method."""
        result, remedy, summary = "canceled: the process of the console has ended", None, None
        try:
            with self._scope:
                try:
                    with anyio.fail_after(self._settings.console_task_timeout):
                        summary = await self._work(action)
                    result = audit.DONE
                except TimeoutError:
                    result = f"canceled after console_task_timeout, {self._settings.console_task_timeout:.0f} s"
                except SubscriberError as error:
                    result, remedy = redact(error.message), error.remedy
                except Exception as error:
                    telemetry.log_error(error, event="console.failed")
                    result = "internal error, see the log"
            if self._scope.cancel_called:
                result = "canceled"
        finally:
            await self._end(action, person, number, result, summary)
            if self.task is not None:
                self.task = replace(self.task, result=result, remedy=remedy, summary=summary)

    async def _work(self, action: ConsoleAction) -> Mapping[str, Any]:
        if action.name is ActionName.VERIFY:
            comparison = await verify(
                self._target,
                action.subscription,
                apply_target=self._apply_target,
                jobs=TASK_JOBS,
                on_progress=self._show,
            )
            return summary_of(comparison)
        repaired = await repair(
            self._target,
            action.subscription,
            tables=action.tables or None,
            apply_target=self._apply_target,
            jobs=TASK_JOBS,
            on_progress=self._show,
        )
        return describe_repair(repaired)

    def _show(self, progress: ComparisonProgress) -> None:
        if self.task is not None:
            self.task = replace(self.task, progress=progress)

    async def _end(
        self, action: ConsoleAction, person: Person, number: int, result: str, summary: Mapping[str, Any] | None = None
    ) -> None:
        """Record the end of an action in the log and in the audit, also while the process ends."""
        telemetry.log(
            telemetry.LOG,
            f'console: "{person.label}" at {person.address}: {action.name} of subscription "{action.subscription}":'
            f" {result}",
            event="console.action",
        )
        with anyio.move_on_after(AUDIT_TIMEOUT, shield=True) as waiting:
            try:
                async with (
                    CatalogConnection.open(self._target, APPLICATION_NAME) as catalog,
                    catalog.use() as connection,
                ):
                    await audit.end(connection, number, result, summary)
                return
            except (SubscriberError, OSError) as error:
                reason = redact(str(error))
        if waiting.cancelled_caught:
            reason = f"no answer within {AUDIT_TIMEOUT:.0f} s"
        telemetry.log(
            telemetry.WARNING,
            f"the end of action {number} is not in subscriber.audit",
            detail=reason,
            event="console.action",
        )


def _too_late() -> SubscriberError:
    return SubscriberError(
        f"the target did not answer within {ACTION_TIMEOUT:.0f} s",
        hint="Look at the state of the subscription, then repeat the action.",
        sqlstate=QUERY_CANCELED,
    )


def describe_repair(result: Repair) -> dict[str, Any]:
    """Return the figures of a repair as a JSON value. It has no values of rows."""
    shown = [table for table in result.tables if table.repaired or not table.is_complete]
    return {
        "lsn": str(result.lsn),
        "tables": len(result.tables),
        "repaired": sum(table.repaired for table in result.tables),
        "complete": result.is_complete,
        "shown": [
            {
                "table": table.name,
                "inserted": table.inserted,
                "updated": table.updated,
                "deleted": table.deleted,
                "unrepaired": table.unrepaired,
                "refused": table.refused,
                "extra": table.extra,
                "outside": table.outside,
                "note": table.note,
            }
            for table in shown[:MOST_SHOWN]
        ],
    }
