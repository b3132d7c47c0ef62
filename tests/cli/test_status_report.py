from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from subscriber import formatting
from subscriber.apply.table_states import TableState
from subscriber.catalog.store.audit import ComparedTables
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.workers import StreamedStatus, WorkerStatus
from subscriber.cli.status_lines import to_json, to_text
from subscriber.lsn import Lsn
from subscriber.publisher.standby_slots import StandbySlot
from subscriber.remedy import Remedy
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.report import state_in_words
from subscriber.status.slot_statistics import SlotStatistics
from subscriber.status.snapshot import LockWait, PublisherAnswer, StatusSnapshot
from subscriber.status.transactions import Prepared
from subscriber.subscription import Subscription

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
SUBSCRIPTION = Subscription(3500000001, "s", "postgres", "host=h password=secret", ("p", "q"), slot_name="slot")
STREAMING = WorkerStatus(
    SUBSCRIPTION.oid,
    0,
    "apply",
    "streaming",
    pid=7,
    received_lsn=Lsn(0x3000),
    latest_end_lsn=Lsn(0x2000),
    last_msg_send_time=NOW - timedelta(seconds=4),
    transactions=100,
    changes=1000,
    bytes=10_000,
)
PUBLISHER = PublisherAnswer(
    position=Lsn(0x3000),
    confirmed=Lsn(0x2000),
    slot_exists=True,
    slot_active=True,
    wal_status="reserved",
    retained_bytes=5000,
    now=NOW,
)


def look(
    *workers: WorkerStatus, launcher: int | None = 5, relations: list[SubscriptionRel] | None = None
) -> StatusSnapshot:
    return StatusSnapshot(NOW, launcher, [SUBSCRIPTION], workers, {SUBSCRIPTION.oid: relations or []})


def text(status: SubscriptionStatus) -> str:
    return to_text(look(), [status])


def test_the_report_of_a_streaming_subscription_has_its_lag() -> None:
    status = assess(SUBSCRIPTION, look(STREAMING), PUBLISHER)
    assert not status.is_wrong
    assert (status.lag_bytes, status.lag_seconds) == (0x1000, 4.0)
    assert text(status).splitlines() == [
        "s: streaming",
        "  publications  p, q",
        "  slot          slot (publisher keeps 4.9 KiB of WAL)",
        "  positions     received 0/3000, confirmed 0/2000, publisher 0/3000",
        "  lag           4.0 KiB, 4 s",
        "  tables        none",
    ]


def test_the_last_comparison_has_a_line() -> None:
    last = ComparedTables(NOW, "0/3000", tables=3, different=0, complete=True)
    for compared, words in {
        last: "03:04:05 UTC at 0/3000: 3 tables without a difference",
        replace(last, different=1, complete=False): "03:04:05 UTC at 0/3000: 1 of 3 tables DIFFERENT, not all rows were"
        " read",
        replace(
            last, ended=NOW - timedelta(days=1)
        ): "2030-01-01 03:04:05 UTC at 0/3000: 3 tables without a difference",
    }.items():
        status = assess(SUBSCRIPTION, replace(look(STREAMING), comparisons={SUBSCRIPTION.oid: compared}), PUBLISHER)
        assert text(status).splitlines()[-1] == f"  compared      {words}"


def test_a_subscription_without_outstanding_changes_has_no_lag() -> None:
    caught_up = replace(PUBLISHER, confirmed=PUBLISHER.position)
    status = assess(SUBSCRIPTION, look(STREAMING), caught_up)
    assert (status.lag_bytes, status.lag_seconds) == (0, 0.0)
    idle = replace(STREAMING, latest_end_lsn=Lsn(0x3000))  # the publisher wrote WAL without published changes
    assert assess(SUBSCRIPTION, look(idle), PUBLISHER).lag_seconds == 0.0
    assert assess(SUBSCRIPTION, look(idle), replace(PUBLISHER, replay_lag=2.5)).lag_seconds == 2.5


def test_an_error_is_told_with_its_time_and_hint() -> None:
    failed = replace(
        STREAMING,
        state="waiting to retry",
        error="duplicate key value",
        error_remedy=Remedy("Skip it."),
        error_time=NOW - timedelta(seconds=75),
        next_retry=NOW + timedelta(seconds=3),
    )
    status = assess(SUBSCRIPTION, look(failed), PUBLISHER)
    assert status.is_wrong
    assert state_in_words(status) == "waiting to retry in 3 s"
    lines = text(status).splitlines()
    assert lines[1] == "  last error    duplicate key value (2030-01-02 03:02:50 UTC, 1 min 15 s ago)"
    assert lines[2] == "  hint          Skip it."
    assert state_in_words(assess(SUBSCRIPTION, look(replace(failed, next_retry=NOW)), PUBLISHER)) == "retrying now"


def test_a_state_that_is_not_known_is_a_problem() -> None:
    status = assess(SUBSCRIPTION, look(replace(STREAMING, state="dreaming")), PUBLISHER)
    assert state_in_words(status) == "not responding"
    assert [problem.message for problem in status.problems] == ['the worker reports the unknown state "dreaming"']
    assert status.problems[0].command == "subscriber run"


def test_a_publisher_that_does_not_answer_is_a_problem() -> None:
    silent = PublisherAnswer(error="no answer within 3 s")
    for subscription in (SUBSCRIPTION, replace(SUBSCRIPTION, enabled=False)):
        (problem,) = assess(subscription, look(STREAMING), silent).problems
        assert (problem.kind, problem.command) == ("publisher", "subscriber check s")
    without_slot = replace(SUBSCRIPTION, enabled=False, slot_name=None)
    assert not assess(without_slot, look(STREAMING), silent).is_wrong


def test_a_slot_that_nobody_reads_is_no_stream() -> None:
    assert assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, slot_active=True)).state == "streaming"
    assert assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, slot_active=False)).state == "connecting"


def test_each_problem_has_a_next_step() -> None:
    for worker in (
        replace(STREAMING, state="stopped", error="gone"),
        replace(STREAMING, state="stopped"),
        replace(STREAMING, state="waiting to retry"),
        replace(STREAMING, error="not passed yet"),
        replace(STREAMING, updated_at=NOW - timedelta(seconds=21)),
    ):
        status = assess(SUBSCRIPTION, look(worker), PUBLISHER)
        assert status.problems
        assert all(problem.hint for problem in status.problems)
        assert "  hint  " in text(status)


def test_no_lag_is_shown_without_a_stream() -> None:
    stopped = replace(STREAMING, state="stopped", error="gone", last_msg_send_time=None, latest_end_time=None)
    stopped = replace(stopped, received_lsn=PUBLISHER.confirmed)
    idle = replace(PUBLISHER, position=PUBLISHER.confirmed, replay_lag=None)
    assert "  lag  " not in text(assess(SUBSCRIPTION, look(stopped), idle))
    lost = replace(PUBLISHER, slot_exists=False, confirmed=None)
    assert assess(SUBSCRIPTION, look(stopped), lost).lag_bytes is None


@pytest.mark.parametrize(
    ("subscription", "seen", "words", "wrong"),
    [
        (SUBSCRIPTION, look(replace(STREAMING, state="stopped", error="gone")), "stopped: needs you", True),
        (SUBSCRIPTION, look(STREAMING, launcher=None), "no launcher running", True),
        (SUBSCRIPTION, look(), "connecting", True),
        (SUBSCRIPTION, look(replace(STREAMING, state="starting")), "connecting", False),
        (replace(SUBSCRIPTION, enabled=False), look(STREAMING, launcher=None), "disabled", False),
        (replace(SUBSCRIPTION, enabled=False), look(replace(STREAMING, state="disabled", error="e")), "disabled", True),
        (SUBSCRIPTION, look(replace(STREAMING, error="not passed yet")), "retrying now", True),
        (SUBSCRIPTION, look(replace(STREAMING, updated_at=NOW - timedelta(seconds=19))), "streaming", False),
        (SUBSCRIPTION, look(replace(STREAMING, updated_at=NOW - timedelta(seconds=21))), "not responding", True),
        (SUBSCRIPTION, replace(look(STREAMING), launcher_age=19.0), "streaming", False),
        (SUBSCRIPTION, replace(look(STREAMING), launcher_age=21.0), "not responding", True),
    ],
)
def test_each_state_has_its_words(subscription: Subscription, seen: StatusSnapshot, words: str, wrong: bool) -> None:
    status = assess(subscription, seen, PUBLISHER)
    assert state_in_words(status) == words
    assert status.is_wrong == wrong


def test_lag_is_measured_from_the_last_heartbeat() -> None:
    old = replace(STREAMING, latest_end_lsn=Lsn(0x3000), latest_end_time=NOW - timedelta(seconds=90))
    assert assess(SUBSCRIPTION, look(old), PUBLISHER).lag_seconds == 90.0
    fresh = replace(old, latest_end_time=NOW - timedelta(seconds=9))
    assert assess(SUBSCRIPTION, look(fresh), PUBLISHER).lag_seconds == 0.0
    assert assess(SUBSCRIPTION, look(replace(fresh, error="failing")), PUBLISHER).lag_seconds == 9.0


def test_a_lock_of_another_session_is_a_problem() -> None:
    waits = {SUBSCRIPTION.oid: [LockWait(7, 14.2, ('process 9 ("psql")',))]}
    status = assess(SUBSCRIPTION, replace(look(STREAMING), lock_waits=waits), PUBLISHER)
    assert status.is_wrong
    assert text(status).splitlines()[1:3] == [
        '  problem       no answer from the target for 14 s, waiting for a lock held by process 9 ("psql")',
        "  hint          Process 7 of the target waits. End the transaction that holds the lock.",
    ]


def test_the_positions_of_a_dead_worker_are_not_shown() -> None:
    seen = replace(look(STREAMING, launcher=None), progress={SUBSCRIPTION.oid: Lsn(0x1000)})
    status = assess(SUBSCRIPTION, seen, PublisherAnswer(error="connection refused"))
    assert (status.received, status.confirmed) == (None, Lsn(0x1000))
    assert "  positions     received -, confirmed 0/1000, publisher not reachable" in text(status).splitlines()
    assert "  publisher     connection refused" in text(status).splitlines()


def test_a_slot_that_is_gone_is_wrong() -> None:
    status = assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, slot_exists=False, confirmed=None))
    assert status.is_wrong
    assert "slot: does not exist on the publisher" in text(status)


def test_transactions_that_are_not_over() -> None:
    since = (NOW - timedelta(seconds=5)).timestamp()
    worker = replace(
        STREAMING,
        waiting_for='process 9 ("psql")',
        streamed=(StreamedStatus(731, 12_000, 2048, since, 1), StreamedStatus(732, 1, 100, since, None)),
    )
    parallel = WorkerStatus(SUBSCRIPTION.oid, 1, "parallel apply", "applying", pid=8)
    prepared = [Prepared(f"pg_gid_1_{number}", f"g{number}", NOW - timedelta(hours=2)) for number in range(7)]
    seen = replace(look(worker, parallel), prepared={SUBSCRIPTION.oid: prepared})
    status = assess(SUBSCRIPTION, seen, PUBLISHER)
    lines = text(status).splitlines()
    assert lines[5:9] == [
        '  waiting for   process 9 ("psql")',
        "  parallel      1 worker (8)",
        "  streamed      transaction 731: 12,000 changes, 2.0 KiB, for 5 s, applied by parallel worker 1",
        "  streamed      transaction 732: 1 change, 100 B, for 5 s, kept",
    ]
    assert lines[9] == "  prepared      pg_gid_1_0, on the publisher 'g0', for 2 h"
    assert lines[14:] == ["  prepared      and 2 more", "  tables        none"]
    document = json.loads(to_json(seen, [status]))["subscriptions"][0]
    assert (document["waiting_for"], document["parallel_pids"]) == ('process 9 ("psql")', [8])
    assert document["streamed"][0] == {"xid": 731, "changes": 12_000, "bytes": 2048, "age": 5.0, "worker": 1}
    assert document["prepared"][6] == {"gid": "pg_gid_1_6", "publisher_gid": "g6", "age": 7200.0}
    stopped = assess(replace(SUBSCRIPTION, enabled=False), seen, PUBLISHER).unfinished
    assert (stopped.streamed, stopped.parallel_pids, len(stopped.prepared)) == ((), (), 7)


def test_tables_that_are_not_ready_have_a_line() -> None:
    relations = [
        SubscriptionRel(1, "public", "a", TableState.READY, Lsn(1)),
        SubscriptionRel(2, "public", "b", TableState.DATASYNC, None),
        SubscriptionRel(3, "public", "c", TableState.INIT, None),
        SubscriptionRel(4, "public", "d", TableState.INIT, None),
    ]
    copying = WorkerStatus(
        SUBSCRIPTION.oid,
        2,
        "table synchronization",
        "copying",
        copy_rows=1000,
        copy_bytes=512,
        copy_total_bytes=2048,
    )
    failed = WorkerStatus(SUBSCRIPTION.oid, 4, "table synchronization", "waiting to retry", error="no such table")
    status = assess(SUBSCRIPTION, look(STREAMING, copying, failed, relations=relations), PUBLISHER)
    assert text(status).splitlines()[-6:] == [
        "  tables        1 ready, 1 copying, 1 waiting, 1 failed",
        "    public.b: copying (1,000 rows, 512 B of about 2.0 KiB, 25 %)",
        "    public.c: waiting",
        "    public.d: failed: no such table",
        "      hint: Find the cause: subscriber check s",
        "            Then read the log of the launcher.",
    ]
    assert status.is_wrong
    timed = replace(copying, started=look().at - timedelta(seconds=30))
    status = assess(SUBSCRIPTION, look(STREAMING, timed, relations=relations), PUBLISHER)
    assert "    public.b: copying (1,000 rows, 512 B of about 2.0 KiB, 25 %, about 1 min 30 s left)" in text(status)
    tables = json.loads(to_json(look(), [status]))["subscriptions"][0]["not_ready"]
    assert [table["seconds_left"] for table in tables] == [90.0, None, None]


def test_statistics_of_the_slot() -> None:
    statistics = SlotStatistics(2, 3 * 1024**2, 14, "wal_not_flushed", 1, NOW - timedelta(seconds=12))
    status = assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, statistics=statistics))
    assert not status.is_wrong
    assert text(status).splitlines()[5:7] == [
        "  decoding      2 transactions spilled to disk (3.0 MiB), logical_decoding_work_mem exceeded 14 times",
        "  slot sync     not synchronized: wal_not_flushed, skipped 1 time, last 12 s ago",
    ]
    publisher = json.loads(to_json(look(), [status]))["subscriptions"][0]["publisher"]
    assert (publisher["spill_txns"], publisher["spill_bytes"], publisher["mem_exceeded_count"]) == (2, 3 * 1024**2, 14)
    assert (publisher["slotsync_skip_reason"], publisher["slotsync_skip_count"]) == ("wal_not_flushed", 1)
    assert publisher["slotsync_last_skip"] == "2030-01-02T03:03:53.000+00:00"


def test_the_walsender_waits_for_a_standby() -> None:
    standbys = (StandbySlot("a", exists=False), StandbySlot("b", exists=True))
    status = assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, standby_slots=standbys))
    assert text(status).splitlines()[5] == (
        '  standby       the walsender waits for synchronized_standby_slots: "a", which does not exist; "b", which is'
        " inactive"
    )
    publisher = json.loads(to_json(look(), [status]))["subscriptions"][0]["publisher"]
    assert publisher["waits_for_standby_slots"] == ["a", "b"]


def test_json_is_one_line_without_the_connection_string() -> None:
    line = to_json(look(), [assess(SUBSCRIPTION, look(STREAMING), PUBLISHER)])
    assert "\n" not in line
    assert "secret" not in line
    (document,) = json.loads(line)["subscriptions"]
    assert (document["state"], document["ok"], document["confirmed_lsn"], document["rates"]) == (
        "streaming",
        True,
        "0/2000",
        None,
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.25, "0.25 s"), (75, "1 min 15 s"), (120, "2 min"), (90061, "1 d 1 h"), (3605, "1 h")],
)
def test_durations_are_printed_in_seconds(seconds: float, words: str) -> None:
    assert formatting.in_seconds(seconds) == words


def test_sizes_and_counts_are_printed_with_units() -> None:
    assert [formatting.in_bytes(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 TiB"]
    assert [formatting.count(1, "table"), formatting.count(2000, "entry", "entries")] == ["1 table", "2,000 entries"]
