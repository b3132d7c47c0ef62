"""Settings: every limit, interval and time-out that a user or a test may change, with its unit, default and reason.

Each field of `Settings` has its documentation below it: first the meaning, then the reason for the default. The value
is taken from the first source that has one:

    command line    --setting status_interval=5s, repeated for each setting
    environment     SUBSCRIBER_STATUS_INTERVAL=5s
    default         the value in this file

A program passes an object instead: `subscriber.connect(target, settings=Settings(status_interval=5))`. The environment
does not change such an object. `Settings.from_environment()` starts from the environment.

A numeric value in text may have a unit of PostgreSQL: 500ms, 10s, 5min, 64MB. Without a unit it is in seconds or bytes.

To add a setting, add a field with its documentation, and pass `Settings` to the code that uses the value. Nothing else:
the option, the variable and the page of the reference follow from the field. A constant stays beside its algorithm
if neither a user nor a test has a reason to change it.

Pure packages do not import this module. Their callers give them plain values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from subscriber.display import near_word
from subscriber.durations import DailyWindow
from subscriber.sizes import UNITS

PREFIX = "SUBSCRIBER_"  # of environment variables

# Multiples of PostgreSQL's units, the base unit first.
MEMORY_UNITS = UNITS
TIME_UNITS = {"s": 1.0, "us": 1e-6, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0}

_NUMBER = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_BOOLEANS = {
    **dict.fromkeys(("on", "true", "yes", "1"), True),
    **dict.fromkeys(("off", "false", "no", "0"), False),
}


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The values that a setting may have.

    Attributes:
        name: the base unit, as the documentation names it; empty for a number of things and for values without a unit.
        multiples: the units that a text may name, with their size in base units.
        minimum: the least value of a number.
        zero_excluded: the value must be greater than `minimum`.
    """

    name: str = ""
    multiples: Mapping[str, float] = field(default_factory=dict)
    minimum: float = 0
    zero_excluded: bool = False


Seconds = Annotated[float, Unit("seconds", TIME_UNITS, zero_excluded=True)]
SecondsOrZero = Annotated[float, Unit("seconds", TIME_UNITS)]
Bytes = Annotated[int, Unit("bytes", MEMORY_UNITS, minimum=1)]
BytesOrZero = Annotated[int, Unit("bytes", MEMORY_UNITS)]
Count = Annotated[int, Unit(minimum=1)]
CountOrZero = Annotated[int, Unit()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits, intervals and time-outs, with a default for each. Times are in seconds, sizes in bytes.

    The page "Settings" of the reference explains each field.

    Raises:
        TypeError: the name of a setting is unknown, or a value has the wrong type.
        ValueError: a value is out of range.
    """

    # --- the connection to the publisher ----------------------------------------------------------

    status_interval: Seconds = 10.0
    """Longest time between two status updates to the publisher. A third of the publisher's wal_sender_timeout, if that
    is shorter.

    Reason: the default of wal_receiver_status_interval."""

    receiver_timeout: Seconds = 60.0
    """Time without a message from the publisher after which the connection counts as lost. The publisher is asked for a
    message in between.

    Reason: the default of wal_receiver_timeout."""

    receive_queue_size: BytesOrZero = 8 * 1024**2
    """Size of the messages that may wait in memory for the apply worker, or for the consumer of a change stream.
    Reading from the publisher stops while more are waiting.

    Reason: covers some milliseconds of a fast publisher; a larger queue costs memory and gains no speed."""

    relation_cache_size: Bytes = 512 * 1024**2
    """Memory for the descriptions of the publisher's tables, for each worker and change stream. More are an error.

    Reason: 100,000 tables of 20 columns take 450 MB. A publisher can describe tables without end."""

    notices_per_minute: CountOrZero = 30
    """Messages of a publisher with severity NOTICE or WARNING that are logged in a minute, for each stream. One more
    line has the number of the others.

    Reason: a publisher that works sends none; one that sends thousands hides the other lines of the log."""

    stream_stop_timeout: SecondsOrZero = 5.0
    """Time for the publisher to send the rest of a transaction, and to receive the last status update, when a stream
    ends. 0 drops the connection immediately.

    Reason: the publisher first sends the rest of its transaction. A lost update only makes it send changes again."""

    touched_ranges: Count = 10_000
    """Ranges of keys that a worker records for a table with `track_ranges`. Wider ones replace them if there are more.

    Reason: they take about 1 MB of memory for a table, and `subscriber verify --since` reads them in seconds."""

    consumer_shutdown_timeout: SecondsOrZero = 5.0
    """Time for `Consumer.shutdown()` when `consume()` is canceled.

    Reason: as stream_stop_timeout."""

    messages_per_turn: Count = 1024
    """Messages that the apply worker, or `subscriber archive`, handles before other tasks run.

    Reason: some milliseconds, within which a request of the publisher for a status update is answered."""

    large_transaction_messages: CountOrZero = 2048
    """Messages of one transaction after which reading prefers large pieces over the shortest delay.

    Reason: nothing of the transaction is visible before its end, and fewer wake-ups leave more time for applying."""

    slot_release_timeout: Seconds = 300.0
    """Time that `subscriber archive` waits for a slot that another process of the publisher still reads. After an error
    in the log, it waits again.

    Reason: the publisher ends the process of a client that has disappeared after wal_sender_timeout, 60 seconds."""

    archive_queue_size: Bytes = 8 * 1024**2
    """Size of the messages that `subscriber archive` may have waiting to be stored. It takes no further ones while
    more are waiting.

    Reason: as receive_queue_size."""

    # --- retries ----------------------------------------------------------------------------------

    retry_interval: SecondsOrZero = 5.0
    """Wait before a worker that failed is started again, and the longest wait between two attempts to connect.

    Reason: the default of wal_retrieve_retry_interval."""

    first_retry_delay: SecondsOrZero = 0.1
    """Wait before the first attempt to reconnect after a transient error. It doubles with each attempt, up to
    retry_interval.

    Reason: a restart of a server takes less than a second, and the worker should be back soon after."""

    max_silent_retries: CountOrZero = 20
    """Immediate restarts of a worker in a row, without progress and without a line in the log. Further ones are logged,
    and delayed as after a transient error.

    Reason: one restart is the rule; more than a few in a row show a fault that must be visible."""

    # --- the launcher -----------------------------------------------------------------------------

    catalog_poll_interval: Seconds = 10.0
    """Time between two reads of the subscriptions in the catalog without a notification.

    Reason: notifications arrive within milliseconds; the read covers a notification that was lost."""

    empty_database_linger: SecondsOrZero = 2.0
    """Time that the launcher stays connected to a database without subscriptions.

    Reason: DROP DATABASE waits 5 seconds for other sessions to leave."""

    empty_database_poll_interval: Seconds = 0.5
    """Time between two connections to a database without subscriptions, to see whether it has one.

    Reason: the first CREATE SUBSCRIPTION takes effect within a second."""

    standby_poll_interval: Seconds = 0.5
    """Time between two attempts of a standby to take over: a launcher, or `subscriber archive --standby`.

    Reason: a takeover within a second of the end of the leader's session."""

    takeover_after: Seconds = 30.0
    """Time without a renewed lease after which a standby launcher takes over. A launcher renews its lease at least
    three times within it.

    Reason: longer than a pause of a busy machine, and short for an interruption."""

    lease_renewal_interval: Seconds = 10.0
    """Longest time between two renewals of the lease. A renewal also checks that the target answers. The status of a
    launcher is "not responding" after 20 seconds without one.

    Reason: one third of the default of takeover_after."""

    target_timeout: Seconds = 60.0
    """Time for the target to answer a renewal of the lease; after that, the target counts as lost.

    Reason: as receiver_timeout. TCP alone would take a quarter of an hour."""

    max_sync_workers: Count = 2
    """Table synchronization workers that run at the same time for one subscription. With copy_engine = ranges, workers
    that no other table needs copy other ranges of the same table.

    Reason: the default of max_sync_workers_per_subscription. Each uses a slot and a walsender on the publisher."""

    sequence_interval: Seconds = 1.0
    """Time between two polls of the publisher's sequences, with `sequences = follow`.

    Reason: the publisher answers a poll in milliseconds, and a sequence cannot get far ahead in a second."""

    sequence_margin: CountOrZero = 1000
    """Calls of nextval() by which `sequences = follow` keeps a sequence of the target ahead. A sequence that moves
    faster gets twice the calls since the last poll.

    Reason: numbers that are never used cost nothing, and a writer uses less than a thousand numbers in a second."""

    report_interval: Seconds = 1.0
    """Time between two writes of the workers' status to the catalog.

    Reason: the status is for people and monitors; a write a second costs the target nothing that can be measured."""

    worker_shutdown_grace: SecondsOrZero = 5.0
    """Time that DROP SUBSCRIPTION gives a worker to stop before it ends the worker's session.

    Reason: a worker has to roll back its open transaction."""

    earlier_session_grace: SecondsOrZero = 2.0
    """Time for the session of an earlier worker to end before a new worker ends it.

    Reason: a backend without a client ends when it next reads or writes. One that waits for a lock does neither."""

    earlier_session_timeout: Seconds = 30.0
    """Time for sessions of an earlier worker to end before the attempt of the new one fails.

    Reason: the rollback of a large transaction takes seconds."""

    # --- waits for locks --------------------------------------------------------------------------

    lock_wait_interval: Seconds = 0.1
    """Time between two checks of an apply worker whether the target has answered, or which lock the worker waits for.

    Reason: a deadlock with a parallel worker ends soon. A check has a cost only during a wait."""

    lock_wait_log_delay: SecondsOrZero = 10.0
    """Time without an answer from the target after which the log names the sessions that block the worker.

    Reason: longer than an ordinary statement takes, so that the log has no line for a healthy target."""

    session_wait_interval: Seconds = 5.0
    """Time between two checks whether a session of the launcher or of a table synchronization waits for a lock.

    Reason: half of lock_wait_log_delay."""

    # --- streamed transactions --------------------------------------------------------------------

    spool_dir: Path | None = None
    """Directory for streamed transactions that have not ended; each worker has a private directory in it.

    Reason: without a value it is TMPDIR, or else /var/tmp, which is on a disk where /tmp may be memory."""

    spool_limit: Bytes | None = None
    """Disk space for streamed transactions, for each worker.

    Reason: without a value it is half of the free space when the worker starts, so that the disk is never full."""

    parallel_messages_per_turn: Count = 256
    """Messages that a parallel worker applies before other tasks run.

    Reason: parallel workers share one event loop with the apply worker, which must not wait for them."""

    default_parallel_workers: CountOrZero = 2
    """Parallel workers of a subscription on a target that is older than max_parallel_apply_workers_per_subscription.

    Reason: the default of that parameter."""

    quarantine_transaction_size: Bytes = 128 * 1024 * 1024
    """Size of a transaction that the worker keeps in memory to compare it with transactions in quarantine. Streamed
    transactions are compared in their files instead.

    Reason: twice the publisher's default of `logical_decoding_work_mem`, from which on it streams a transaction."""

    quarantine_rows: Count = 1_000_000
    """Rows that all transactions in quarantine may hold. More stop the subscription.

    Reason: the worker has their keys in memory, about 300 bytes each."""

    spool_buffer_size: Bytes = 256 * 1024
    """Size of the changes of one transaction that are written to disk, or read, together.

    Reason: large enough for the disk, and small beside the batches in memory."""

    spool_block_remainder: BytesOrZero = 16 * 1024
    """Size of the end of a block that may stay in memory until more of its transaction arrives. For a parallel worker
    it is written immediately.

    Reason: a publisher that interleaves many transactions sends small blocks, and a write for each would be slow."""

    # --- batches ----------------------------------------------------------------------------------

    batch_rows: Count = 10_000
    """Changes after which a batch is sent to the target.

    Reason: the cost of a statement is negligible for so many changes; more changes only delay the first."""

    batch_size: Bytes = 2 * 1024**2
    """Size of the messages after which a batch is sent to the target.

    Reason: four batches in flight stay below 10 MB. They are kept until the target answers."""

    batch_steps: CountOrZero = 24
    """Statements for one table after which a batch is sent to the target.

    Reason: a batch that needs more has few changes in each statement, and is no faster than single changes."""

    batch_small_transaction: CountOrZero = 1000
    """Changes of an open transaction for which a full batch still waits for its COMMIT.

    Reason: a transaction that is split needs a savepoint, and its COMMIT waits for the answer."""

    batch_run: Count = 8
    """Consecutive changes of the same kind to one table that are taken from the queue together.

    Reason: fewer do not pay for the comparison of the first with the last."""

    batch_largest_message: Bytes = 256 * 1024
    """Size of a change above which it is applied alone.

    Reason: the time for such a value is spent on its bytes, and the batch would keep a copy."""

    batch_min_rows: CountOrZero = 16
    """Changes below which a batch is applied row by row.

    Reason: BEGIN, the checks and the progress of a batch cost as much as some single changes."""

    batch_min_rows_per_step: CountOrZero = 3
    """Average number of changes in a statement below which a batch is applied row by row.

    Reason: a statement for several rows costs as much as two or three for one row."""

    batch_retry_rows: CountOrZero = 1000
    """Changes that are applied row by row after the target has rejected a batch. The number doubles with each further
    rejection.

    Reason: the cause of a rejection often concerns the next changes too, and a rejected batch is applied twice."""

    batches_in_flight: Count = 4
    """Batches that may wait for an answer of the target; one more for each further session of apply_sessions.

    Reason: enough that neither side waits for the other."""

    parallel_batch_min_rows: CountOrZero = 1000
    """Changes from which a batch is sent to an idle session of apply_sessions while other sessions are busy.

    Reason: smaller batches are better collected until the answer arrives."""

    copy_chunk_rows: Count = 1000
    """Rows in one CopyData message to the target.

    Reason: bounds the memory for a copy of the rows."""

    # --- other databases --------------------------------------------------------------------------

    mirror_batch_changes: CountOrZero = 5000
    """Changes of small transactions that `mirror()` commits together on the target. 0 commits each transaction alone.

    Reason: a commit costs other databases as much as some hundred rows. Fewer are committed when no change waits."""

    wal_budget_interval: Seconds = 10.0
    """Time between two queries for the WAL that a publisher keeps for a subscription with `wal_budget`.

    Reason: a publisher that writes 1 GB of WAL a second exceeds a budget by 20 GB at most."""

    publication_interval: Seconds = 10.0
    """Time between two looks at the publications of a subscription, for tables that are not published any more.

    Reason: the launcher notices a table that is removed and added again later than that."""

    # --- the status, over HTTP and as a command ---------------------------------------------------

    forgotten_after: Seconds = 3600.0
    """Time after which the status reports something that keeps WAL on the publisher.

    It may be a disabled subscription, an open transaction, or a prepared one.

    Reason: longer than a maintenance, and shorter than the time in which WAL fills a disk."""

    status_publisher_timeout: Seconds = 3.0
    """Time for each publisher to answer when the status is read.

    Reason: a publisher that is down must not delay the status of the others."""

    status_lock_timeout: Seconds = 5.0
    """Time for `subscriber status` to wait for a lock on the tables of schema "subscriber".

    Reason: longer than any statement of ours holds such a lock."""

    http_max_age: SecondsOrZero = 1.0
    """Time for which an answer of the HTTP server is given again without another read of the catalog.

    Reason: several monitors together cost the target one read a second."""

    http_target_timeout: Seconds = 5.0
    """Time for the target to answer a read of the catalog by the HTTP server.

    Reason: half of the time-out of a Prometheus scrape."""

    http_max_connections: Count = 32
    """Connections to the HTTP server, and requests that it answers at the same time. A few more are kept for /health
    and /metrics. A further connection takes the place of one without a request. A further request gets status 503.

    Reason: many more than there are monitors, and far fewer than a process has file descriptors."""

    http_idle_timeout: Seconds = 10.0
    """Time for a client of the HTTP server to send a request, after it has connected or read the last response.

    Reason: clients send a request as soon as they have connected."""

    http_request_timeout: Seconds = 30.0
    """Time for an answer of the HTTP server, until the client has read it. Streams of events have no end; a client that
    does not read one for this time is disconnected.

    Reason: an answer takes http_target_timeout at most, and the rest is for the network."""

    history_retention: SecondsOrZero = 0.0
    """Time for which `subscriber run --http` keeps rates, lag and kept WAL by the minute in `subscriber.history`. 0: it
    keeps the last hour in memory alone.

    Reason: a target that is only read must not grow."""

    history_rows: Count = 100_000
    """Rows of `subscriber.history`. The oldest ones are deleted.

    Reason: ten subscriptions for a week, in about 15 MB."""

    console_task_timeout: Seconds = 6 * 3600.0
    """Time after which a comparison or repair that was started on the console is canceled.

    Reason: a night; a longer one belongs to `subscriber verify`, which can continue after a kill."""

    # --- applying ---------------------------------------------------------------------------------

    flush_interval: SecondsOrZero = 0.03
    """Shortest time between two flushes that make commits on the target durable. Commits within it share a flush.

    Reason: a flush waits for the disk; the publisher has to keep WAL only 30 ms longer."""

    confirm_interval: SecondsOrZero = 0.2
    """Shortest time between two records of a confirmed position that no transaction of the subscription has.

    Reason: a publisher that is busy with other tables moves all the time, and each record is a commit."""

    retention_interval: Seconds = 30.0
    """Time between two attempts of a worker to forget deleted rows that `retain_dead_tuples` has kept.

    Reason: each attempt connects to the publisher, and a deleted row takes some hundred bytes."""

    look_ahead_pause: Seconds = 0.1
    """Time without a change after which a new worker examines all tables of its subscription.

    Reason: a backlog has ended; its changes need the processor more."""

    look_ahead_timeout: SecondsOrZero = 10.0
    """Time after which a new worker examines all tables even if changes arrive.

    Reason: some streams never pause."""

    sync_hold_time: SecondsOrZero = 10.0
    """Time for which a table that is not ready holds back the applied position that the publisher sees.

    Reason: a COMMIT on the publisher with synchronous_commit = remote_apply waits for that position. It must not
    wait for the copy of a large table."""

    range_rows: Count = 50_000
    """Rows of the first range of a table that is copied with copy_engine = ranges.

    Reason: a range takes less than a second also on slow servers."""

    range_duration: Seconds = 1.0
    """Time that the copy of one range is to take. The rows of the next range follow from the time of the last one.

    Reason: a kill loses one range, the publisher keeps a snapshot for one range, and changes of its rows wait."""

    range_wait_limit: Seconds = 30.0
    """Time for which a change waits for the range of its row. Afterwards the range is read again.

    Reason: a trigger of the target can make the copy wait for the apply worker."""

    range_window: DailyWindow | None = None
    """Time of the day in which ranges are copied, such as 22:00-06:00, in the time zone of the target. At other times,
    copies by ranges pause. None: they never do.

    Reason: most publishers have no quiet hours."""

    copy_rate: Bytes | None = None
    """Bytes that all initial copies of a launcher together read in a second. None: there is no limit.

    Reason: a copy that ends early holds its snapshots for a shorter time."""

    index_sessions: Count = 4
    """Indexes that a launcher builds at a time with copy_indexes = after. Each has a session of the target.

    Reason: each build also has the parallel workers of max_parallel_maintenance_workers."""

    index_memory: Bytes = 256 * 1024**2
    """maintenance_work_mem of the sessions that build indexes with copy_indexes = after.

    Reason: a build that sorts in memory is faster. At most `index_sessions` builds run at a time."""

    index_lock_timeout: Seconds = 30.0
    """Time for which the build of an index waits for a lock on its table. Afterwards the worker is retried.

    Reason: while the build waits, changes of the table wait behind it."""

    one_by_one: bool = False
    """Apply each change with a statement of its own, and never in batches. For comparisons, and to locate errors.

    Reason: batches have the same result and are several times faster."""

    # --- lakes ------------------------------------------------------------------------------------

    lake_wait_limit: Seconds = 600.0
    """Time for which the commands of `subscriber lake` except `follow` wait for the publisher or the change log before
    a table that they have loaded can be read, and `verify` for the change log before the comparison.

    Reason: a restart of the publisher or of the archiver takes less, and a run that a scheduler starts has to end."""

    # --- lakes of Iceberg tables ------------------------------------------------------------------

    lake_rewrite_size: BytesOrZero = 128 * 1024
    """Size of a file of a table below which a change of a row writes the file again. Of larger files, the positions of
    changed rows are written to a delete file.

    Reason: a file of this size is written in milliseconds, and each delete file costs readers a request. With 1MB, a
    batch of 10,000 changes wrote the new rows of up to seven earlier ones again."""

    lake_deleted_percent: CountOrZero = 10
    """Rows of a file, in percent, that may be deleted by their positions. A change beyond that writes the file again.
    0: there are no delete files, and a change of a row writes its file again.

    Reason: more would save little, because a file is written again only after a tenth of its rows has changed. Polars
    reads a table with a tenth deleted as fast as one without. PyIceberg takes 0.7 s instead of 0.2 s for a million rows
    with positions, also if they are few."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            _check(name, hint, getattr(self, name))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **values: Any) -> Settings:
        """Return the settings of the environment. `values` take precedence.

        Args:
            environment: variables and their values. None: the environment of the process. An empty variable counts as
                absent.
            values: settings by name.

        Raises:
            TypeError: the name of a setting is unknown, or a value has the wrong type.
            ValueError: a value is invalid for its setting. The message names the variable.
        """
        given = os.environ if environment is None else environment
        settings = {}
        for name in cls.names():
            variable = variable_of(name)
            if text := given.get(variable):
                try:
                    settings[name] = parse_value(name, text)
                except ValueError as error:
                    raise ValueError(f"environment variable {variable}: {error}") from None
        return cls(**{**settings, **values})

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all settings, in the order of the documentation."""
        return [setting.name for setting in fields(cls)]


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse texts of the form NAME=VALUE. Returns the values by name; the last one of a name counts.

    Raises:
        ValueError: a setting is unknown, or a value is invalid.
    """
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f'"{assignment}" must have the form NAME=VALUE')
        name = name.strip()
        values[name] = parse_value(name, text)
    return values


def parse_value(name: str, text: str) -> Any:
    """Parse the value of a setting.

    Args:
        name: the name of the setting.
        text: its value, which may have a unit.

    Raises:
        ValueError: the setting is unknown, or the value is invalid.
    """
    hint = _hints().get(name)
    if hint is None:
        known = Settings.names()
        near = near_word(name, known) or f"Valid are: {', '.join(known)}."
        raise ValueError(f'unrecognized setting "{name}". {near}')
    kind, unit = kind_of(hint)
    if kind is Path:
        return Path(text)
    if kind is DailyWindow:
        try:
            return DailyWindow.parse(text)
        except ValueError as error:
            raise _invalid(name, text, str(error)) from None
    if kind is bool:
        if (flag := _BOOLEANS.get(text.strip().lower())) is None:
            raise _invalid(name, text, f"valid values are {', '.join(_BOOLEANS)}")
        return flag
    valid = f"; valid units are {', '.join(unit.multiples)}" if unit.multiples else ""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _invalid(name, text, f"a number is required{valid}")
    if match[2] and match[2] not in unit.multiples:
        raise _invalid(name, text, valid.removeprefix("; ") or "the setting has no unit")
    number = float(match[1]) * (unit.multiples[match[2]] if match[2] else 1)
    if kind is int and not number.is_integer():
        raise _invalid(name, text, "a whole number is required")
    value = kind(number)
    _check(name, hint, value)
    return value


def variable_of(name: str) -> str:
    """Return the name of a setting's environment variable."""
    return PREFIX + name.upper()


def kind_of(hint: Any) -> tuple[type, Unit]:
    """Return the type and the unit of a setting from its annotation. None is not counted as a type."""
    alternatives = [alternative for alternative in get_args(hint) if alternative is not type(None)]
    if type(None) in get_args(hint):
        return kind_of(alternatives[0])
    if alternatives:  # Annotated
        return alternatives[0], alternatives[1]
    return hint, Unit()


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Settings, include_extras=True)


def _check(name: str, hint: Any, value: object) -> None:
    """Raise TypeError or ValueError if the setting cannot have this value."""
    if value is None and type(None) in get_args(hint):
        return
    kind, unit = kind_of(hint)
    allowed: Any = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f'setting "{name}" requires a value of type {kind.__name__}, not {type(value).__name__}')
    if isinstance(value, int | float) and kind is not bool:
        too_small = value <= unit.minimum if unit.zero_excluded else value < unit.minimum
        if too_small or not math.isfinite(value):
            bound = "greater than" if unit.zero_excluded else "at least"
            raise ValueError(
                f'setting "{name}" is {value:g}, and must be {bound} {unit.minimum:g} {unit.name}'.rstrip()
            )


def _invalid(name: str, text: str, why: str) -> ValueError:
    return ValueError(f'invalid value for setting "{name}": "{text}"; {why}')


DEFAULTS = Settings()  # an immutable default for parameters
