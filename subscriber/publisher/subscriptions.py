"""Connections to the publisher of a subscription, and the options of its stream."""

from __future__ import annotations

from subscriber.connection.errors import libpq_message
from subscriber.errors import ConnectionLost, ServerError, SubscriberError
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.sqlstate import CLASS_INVALID_AUTHORIZATION, INVALID_CATALOG_NAME
from subscriber.subscription import Subscription


async def connect_publisher(subscription: Subscription, application_name: str, worker: str, encoding: str) -> Publisher:
    """Connect to the publisher of a subscription.

    Args:
        subscription: has the connection string, and whether it must contain the password.
        application_name: the name of the connection on the publisher.
        worker: the worker's name in an error message.
        encoding: the encoding of the target's database. The publisher sends rows in it.

    Raises:
        ConnectionLost: the publisher cannot be reached or rejects the connection. The message names the worker.
    """
    try:
        return await Publisher.connect(
            subscription.conninfo,
            application_name=application_name,
            client_encoding=encoding,
            must_use_password=subscription.must_use_password,
        )
    except (ServerError, ConnectionLost) as error:
        what = f'{worker} for subscription "{subscription.name}" could not connect to the publisher'
        raise ConnectionLost(
            f"{what}: {libpq_message(error)}",
            detail=error.detail,
            hint=_correction(error, subscription),
            sqlstate=error.sqlstate,
        ) from error


def _correction(error: SubscriberError, subscription: Subscription) -> Remedy | None:
    """Return the hint of a refused connection, with the statement if another connection string can help."""
    if not error.sqlstate.startswith((CLASS_INVALID_AUTHORIZATION, INVALID_CATALOG_NAME)):
        return error.remedy
    statement = f"ALTER SUBSCRIPTION {identifier(subscription.name)} CONNECTION '…';"
    change = Remedy(f"change the connection string: {statement}")
    return change if error.remedy is None else error.remedy.with_alternative(change)


def stream_options(subscription: Subscription, *, binary: bool, two_phase: bool = False) -> StreamOptions:
    """Return the options of START_REPLICATION for a subscription.

    Args:
        subscription: has all other options.
        binary: request values in binary.
        two_phase: request transactions when they are prepared. Always False for table synchronization workers.
    """
    return StreamOptions(
        publications=subscription.publications,
        binary=binary,
        streaming=subscription.streaming.option,
        two_phase=two_phase,
        origin=subscription.origin,
    )
