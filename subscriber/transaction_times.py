"""TransactionTimes: when a transaction of the stream reached each stage, from its arrival to its confirmation.

    with measured_by(function_of):      # as opentelemetry.py does
        …                               # apply workers that start here call function_of(subscription)(times)

A task that starts in the block inherits the function. Without one, workers measure nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn


@dataclass(slots=True)
class TransactionTimes:
    """The stages of one transaction. Times are nanoseconds since 1970 by this machine's clock.

    Attributes:
        kind: its end in PostgreSQL's words: COMMIT, PREPARE, COMMIT PREPARED, ROLLBACK PREPARED, STREAM COMMIT or
            STREAM PREPARE.
        xid: on the publisher.
        changes: row changes and TRUNCATEs, including those that were not applied.
        bytes: the received bytes.
        began: arrival of its first message.
        committed: its end on the publisher, by the publisher's clock, in microseconds since 2000-01-01 UTC.
        finish_lsn: the position for ALTER SUBSCRIPTION … SKIP.
        end_lsn: the position to confirm.
        received: arrival of its last message. None, and each later time: not reached.
        applied: the target has acknowledged its end.
        flushed: it is durable on the target.
        confirmed: the publisher may discard it.
        error: the error that ended the worker in this transaction. None: there was none.
        failed: the time of the error.
    """

    kind: str
    xid: int
    began: int
    changes: int = 0
    bytes: int = 0
    committed: int = 0
    finish_lsn: Lsn = Lsn(0)
    end_lsn: Lsn = Lsn(0)
    received: int | None = None
    applied: int | None = None
    flushed: int | None = None
    confirmed: int | None = None
    error: SubscriberError | None = None
    failed: int | None = None

    def end(self, kind: str, finish_lsn: Lsn, end_lsn: Lsn, committed: int, now: int) -> None:
        """Record the arrival of the last message."""
        self.kind, self.finish_lsn, self.end_lsn, self.committed = kind, finish_lsn, end_lsn, committed
        self.received = now

    def fail(self, error: SubscriberError, now: int) -> None:
        """Record the error that ended the worker in this transaction."""
        self.error, self.failed = error, now


TimesReceiver: TypeAlias = Callable[[TransactionTimes], None]

_receiver_of: ContextVar[Callable[[str], TimesReceiver] | None] = ContextVar(
    "subscriber_transaction_times", default=None
)


@contextmanager
def measured_by(receiver_of: Callable[[str], TimesReceiver]) -> Iterator[None]:
    """Measure the transactions of workers that are started in the block.

    Args:
        receiver_of: takes the name of a subscription. Returns the function that receives its transactions when they
            end. The function must be quick, and must not raise.
    """
    token = _receiver_of.set(receiver_of)
    try:
        yield
    finally:
        # A fixture of pytest can end in another context than it began, which has no token.
        with suppress(ValueError):
            _receiver_of.reset(token)


def receiver_for(subscription: str) -> TimesReceiver | None:
    """Return the function that receives the transactions of a subscription. None: nothing is measured."""
    receiver_of = _receiver_of.get()
    return None if receiver_of is None else receiver_of(subscription)
