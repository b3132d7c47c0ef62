"""CONTEXT lines, identical to those of apply_error_callback() in PostgreSQL's worker.c."""

from __future__ import annotations

import pytest

from subscriber.apply.error_context import error_context
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.server_version import Wording

TRANSACTION = RemoteTransaction(739, Lsn.parse("0/14EFEE8"), 0)


@pytest.mark.parametrize(
    ("relation", "column", "transaction", "expected"),
    [
        (None, None, None, ""),
        (None, None, TRANSACTION, " in transaction 739, finished at 0/14EFEE8"),
        (
            "s.t",
            None,
            TRANSACTION,
            ' for replication target relation "s.t" in transaction 739, finished at 0/14EFEE8',
        ),
        (
            "s.t",
            "c",
            TRANSACTION,
            ' for replication target relation "s.t" column "c" in transaction 739, finished at 0/14EFEE8',
        ),
    ],
)
def test_the_context_line_has_only_known_facts(
    relation: str | None, column: str | None, transaction: RemoteTransaction | None, expected: str
) -> None:
    beginning = 'processing remote data for replication origin "pg_3500000000" during message type "INSERT"'
    assert (
        error_context("pg_3500000000", "INSERT", Wording.POSTGRESQL_18, relation, column, transaction)
        == beginning + expected
    )
