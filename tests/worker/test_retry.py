"""The reaction to each error, and the delay of the next attempt."""

from __future__ import annotations

import pytest

from subscriber.errors import (
    ApplyError,
    ChangeLogDamaged,
    ChangeLogError,
    ConnectionLost,
    EndOfStream,
    HookError,
    HooksMissing,
    MappingError,
    ProtocolError,
    PublisherError,
    PublisherReplaced,
    ServerError,
    SlotLost,
    StaleCatalog,
    StaleMapping,
    SubscriberError,
    TextNeeded,
)
from subscriber.exception_groups import iter_leaf_exceptions, root_cause
from subscriber.retry import Reaction, RetryDelay, reaction
from subscriber.settings import Settings


def server_error(sqlstate: str) -> ServerError:
    return ServerError({"C": sqlstate, "M": "no"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StaleMapping("x"), Reaction.IMMEDIATE),
        (TextNeeded("x"), Reaction.SHORT_DELAY),
        (StaleCatalog("x"), Reaction.SHORT_DELAY),
        (SlotLost("x"), Reaction.STOP),
        (PublisherReplaced("x"), Reaction.STOP),
        (PublisherError("x"), Reaction.STOP),
        (HooksMissing("x"), Reaction.STOP),
        (ChangeLogDamaged("x"), Reaction.STOP),
        (ChangeLogError("x", sqlstate="53100"), Reaction.INTERVAL),
        (HookError("x"), Reaction.INTERVAL),
        (ConnectionLost("x"), Reaction.BACKOFF),
        (EndOfStream("x"), Reaction.BACKOFF),
        (ConnectionResetError(), Reaction.BACKOFF),
        (TimeoutError(), Reaction.BACKOFF),
        (ProtocolError("x"), Reaction.INTERVAL),
        (MappingError("x"), Reaction.INTERVAL),
        (ApplyError("x"), Reaction.INTERVAL),
        (SubscriberError("x"), Reaction.INTERVAL),
        (ValueError("a bug"), Reaction.INTERVAL),
        (server_error("08006"), Reaction.BACKOFF),  # connection_failure
        (server_error("57P01"), Reaction.BACKOFF),  # admin_shutdown
        (server_error("57P03"), Reaction.BACKOFF),  # cannot_connect_now
        (server_error("53300"), Reaction.BACKOFF),  # too_many_connections
        (server_error("55006"), Reaction.BACKOFF),  # object_in_use: the slot is active
        (server_error("40001"), Reaction.BACKOFF),  # serialization_failure
        (server_error("40P01"), Reaction.BACKOFF),  # deadlock_detected
        (server_error("55P03"), Reaction.BACKOFF),  # lock_not_available
        (server_error("SB002"), Reaction.BACKOFF),  # progress out of step
        (server_error("23505"), Reaction.INTERVAL),  # unique_violation
        (server_error("22P02"), Reaction.INTERVAL),  # invalid_text_representation
        (server_error("42501"), Reaction.INTERVAL),  # insufficient_privilege
        (server_error("25006"), Reaction.BACKOFF),  # read_only_sql_transaction
        (server_error("53100"), Reaction.BACKOFF),  # disk_full
        (server_error("53400"), Reaction.BACKOFF),  # configuration_limit_exceeded: no origin is free
        (server_error("57014"), Reaction.INTERVAL),  # query_canceled
        (server_error("28P01"), Reaction.INTERVAL),  # invalid_password
        (server_error("P0001"), Reaction.INTERVAL),  # raised by a trigger
    ],
    ids=lambda value: value.name if isinstance(value, Reaction) else f"{type(value).__name__} {value}",
)
def test_each_error_has_its_reaction(error: BaseException, expected: Reaction) -> None:
    assert reaction(error) is expected


def test_each_reaction_has_its_delay() -> None:
    backoff = RetryDelay(Settings(first_retry_delay=0.3, retry_interval=7))
    assert backoff.next(Reaction.IMMEDIATE) == 0.0
    assert backoff.next(Reaction.SHORT_DELAY) == 0.3
    assert backoff.next(Reaction.INTERVAL) == 7
    with pytest.raises(ValueError, match="no next attempt"):
        backoff.next(Reaction.STOP)


def test_waits_after_transient_errors_grow_and_begin_anew() -> None:
    settings = Settings()
    backoff = RetryDelay(settings)
    full = settings.first_retry_delay
    for _ in range(2000):
        assert full / 2 <= backoff.next(Reaction.BACKOFF) <= full
        full = min(settings.retry_interval, full * 2)
    assert full == settings.retry_interval
    backoff.reset()
    assert backoff.next(Reaction.BACKOFF) <= settings.first_retry_delay


def test_workers_do_not_come_back_together() -> None:
    assert len({RetryDelay().next(Reaction.BACKOFF) for _ in range(20)}) > 1


def test_the_cause_of_several_errors() -> None:
    lost, refused, bug = ConnectionLost("lost"), ApplyError("refused"), KeyError("bug")
    assert root_cause(lost) is lost
    assert root_cause(BaseExceptionGroup("", [lost, refused])) is refused
    assert root_cause(BaseExceptionGroup("", [lost, BaseExceptionGroup("", [refused, bug])])) is bug
    first, second = ApplyError("first"), ApplyError("second")
    assert root_cause(BaseExceptionGroup("", [first, second])) is first
    assert list(iter_leaf_exceptions(BaseExceptionGroup("", [lost, BaseExceptionGroup("", [refused])]))) == [
        lost,
        refused,
    ]
