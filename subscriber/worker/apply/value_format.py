"""In which format an apply worker asks for values: what the subscription says of `binary`, or what is quicker.

Binary is quicker, and right where every column has the same built-in type on both sides (apply/batch/binary_types.py).
Whether that is so, and stays so, nobody asks beforehand. The publisher describes a table before its first change in
a connection, and anew after an ALTER TABLE; only then is the table looked at on the target, and what the target
alters is looked at again before anything is committed (targets/postgres/session/schema_check.py). So where the
subscription does not say, the worker asks for binary and checks each table as it is mapped (worker/session/applier.py).
One that does not fit ends the worker with TextNeeded before any value of the table has been sent to the target, and the
next one asks for text.

Why nothing is lost, applied twice or misread: the end is that of a worker that fails. What was committed has moved
the progress row with it, everything else is rolled back with the session, and the next worker goes on from the row.
What was kept of streamed transactions goes with the old stream, and comes again in the new one from its beginning; a
parallel worker that meets such a table gives up, and the apply worker meets it in the file. A prepared transaction is
on the target already, in values of the target's own, or comes again whole. Format and check belong to one connection:
a worker that was killed between leaves nothing behind that another could take for the other format.

The supervisor remembers it, not the catalog: the types may have been made equal since. It forgets at a statement on
the subscription and with the launcher, and the next worker tries binary again. Table synchronization has streams of
its own, most of them short: in text, unless the subscription says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subscriber.apply.hooks.config import Hooks
from subscriber.subscription import OPTIONS, Subscription


@dataclass(frozen=True, slots=True)
class ValueFormat:
    name: Literal["binary", "text"]
    reason: str | None = None  # why text, if nobody has said so

    @property
    def binary(self) -> bool:
        return self.name == "binary"


def choose_format(
    subscription: Subscription, hooks: Hooks | None, server_version: int, text_because: str | None
) -> ValueFormat:
    """`text_because` is why an earlier worker of this subscription had to give binary up; None: it had not."""
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
