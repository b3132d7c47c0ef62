"""Choose the format, binary or text, in which an apply worker requests values from the publisher.

Purpose. The option `binary` of the subscription decides. If it is not set, the worker requests binary, which is faster.
Before that, it looks for published columns that the publisher cannot send in binary (Publisher.column_without_binary).
Binary is correct if every column has the same built-in type on both sides (apply/batch/binary_types.py). The worker
checks this for each table when it maps the table (worker/session/applier.py). A table that fails the check ends the
worker with TextNeeded, and the next worker requests text.

Invariants.

- The check precedes all values. The publisher describes a table before its first change in a connection, and again
  after an ALTER TABLE. If the target's table is altered, it is checked again before the next commit
  (targets/postgres/session/schema_check.py). So no value of a table that fails the check is committed.
- Format and check belong to one connection. A worker that is killed leaves no values that another worker could read in
  the other format.
- The supervisor stores the result, not the catalog, because the types may be made equal later. A statement on the
  subscription and a restart of the launcher discard it. Then the next worker requests binary again.
- Table synchronization workers have separate streams, and most are short. They request text unless the subscription
  sets `binary`.

- If the publisher refuses a value in binary, the next worker requests text. A column of such a type may be added at any
  time, and the refusal can arrive before the description of the table.

Failure cases. The end with TextNeeded is the same as after any other error of a worker.

- Transactions in progress: committed ones have moved the progress record. The session rolls back all others, and the
  next worker resumes from the record.
- Streamed transactions in the spool: the files are discarded, and the publisher sends the transactions again from their
  start.
- Parallel worker maps a table that fails the check: it gives up. The apply worker maps the table when it applies the
  file.
- Prepared transactions: each is on the target already, in the target's own format, or is sent again completely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subscriber.apply.hooks.config import Hooks
from subscriber.subscription import OPTIONS, Subscription


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """The format that a worker requests.

    Attributes:
        name: "binary" or "text".
        reason: the reason for text, if the subscription has not set it. None: there is none.
    """

    name: Literal["binary", "text"]
    reason: str | None = None

    @property
    def binary(self) -> bool:
        """True if the format is binary."""
        return self.name == "binary"


def choose_format(
    subscription: Subscription, hooks: Hooks | None, server_version: int, text_because: str | None
) -> ValueFormat:
    """Choose the format for the next stream of an apply worker.

    Args:
        subscription: its option `binary` takes precedence.
        hooks: the program's hooks. Text is chosen for a hook that reads values. None: there are none.
        server_version: the publisher's server_version_num. Old publishers support only text.
        text_because: the reason why an earlier worker ended with TextNeeded, or why the publisher cannot send binary.
            None: there is none.
    """
    if subscription.binary is False:
        return ValueFormat("text")
    if not OPTIONS["binary"].is_supported_by(server_version):
        return ValueFormat("text", f"the publisher is older than PostgreSQL {OPTIONS['binary'].since}")
    if subscription.binary is None:
        reason = _hook_reads_values(hooks) or text_because
        if reason is not None:
            return ValueFormat("text", reason)
    return ValueFormat("binary")


def _hook_reads_values(hooks: Hooks | None) -> str | None:
    tables = () if hooks is None else sorted(name for name, hook in hooks.tables.items() if hook.reads_values)
    return f'the hook of table "{".".join(tables[0])}" reads values' if tables else None
