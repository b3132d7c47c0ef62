"""Every message of a stream, and the messages that are legal after each beginning of one."""

from __future__ import annotations

from subscriber.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldPart,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from subscriber.testing import FIRST
from tests.apply.build import remote, row

FINISH, END = Lsn(FIRST + 100), Lsn(FIRST + 120)
BEGIN = Begin(FINISH, 1_000_000, 731)
COMMIT = Commit(FINISH, END, 1_000_000)
BEGIN_PREPARE = BeginPrepare(FINISH, END, 1_000_000, 731, "gid")
PREPARE = Prepare(FINISH, END, 1_000_000, 731, "gid")
FIRST_BLOCK, BLOCK, STOP = StreamStart(731, True), StreamStart(731, False), StreamStop()
RELATION = remote("a*", "b")
INSERT = Insert(None, RELATION.relid, row("1", "x"))

EVERYTHING: dict[str, Message] = {
    "BEGIN": BEGIN,
    "COMMIT": COMMIT,
    "ORIGIN": Origin(Lsn(0), "o"),
    "RELATION": RELATION,
    "TYPE": Type(None, 20000, "s", "mood"),
    "INSERT": INSERT,
    "UPDATE": Update(None, RELATION.relid, None, None, row("1", "y")),
    "DELETE": Delete(None, RELATION.relid, OldPart.KEY, row("1", None)),
    "TRUNCATE": Truncate(None, False, False, (RELATION.relid,)),
    "MESSAGE": LogicalMessage(None, True, Lsn(99), "p", b"c"),
    "STREAM START": FIRST_BLOCK,
    "STREAM STOP": STOP,
    "STREAM COMMIT": StreamCommit(731, FINISH, END, 1_000_000),
    "STREAM ABORT": StreamAbort(731, 731, None, None),
    "BEGIN PREPARE": BEGIN_PREPARE,
    "PREPARE": PREPARE,
    "COMMIT PREPARED": CommitPrepared(FINISH, END, 1_000_000, 731, "gid"),
    "ROLLBACK PREPARED": RollbackPrepared(FINISH, END, 3, 4, 731, "gid"),
    "STREAM PREPARE": StreamPrepare(FINISH, END, 1_000_000, 731, "gid"),
}
IDLE = {
    "BEGIN",
    "BEGIN PREPARE",
    "COMMIT PREPARED",
    "ROLLBACK PREPARED",
    "STREAM START",
    "STREAM ABORT",
    "STREAM COMMIT",
    "STREAM PREPARE",
}
# An open block spools these messages as they are. A reader of the block may also deliver ORIGIN.
CHANGES = {"RELATION", "TYPE", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "MESSAGE"}


def _after(*messages: Message, ends_with: str) -> dict[str, tuple[list[Message], set[str]]]:
    """Return the states after each of the messages that may follow in the transaction that `messages` begin."""
    return {
        f"after {', '.join(m.message_type for m in messages)}, {name}": (
            [*messages, EVERYTHING[name]],
            {*CHANGES, ends_with},
        )
        for name in sorted({*CHANGES, "ORIGIN"})
    }


# State -> the messages that lead to it, and the messages that it allows.
STATES: dict[str, tuple[list[Message], set[str]]] = {
    "idle": ([], IDLE),
    "idle after an empty transaction": ([BEGIN, COMMIT], IDLE),
    "idle after a transaction": ([BEGIN, INSERT, COMMIT], IDLE),
    "idle after a prepared one": ([BEGIN_PREPARE, INSERT, PREPARE], IDLE),
    "idle after a block": ([FIRST_BLOCK, STOP], IDLE),
    "idle after a streamed one": ([FIRST_BLOCK, STOP, EVERYTHING["STREAM COMMIT"]], IDLE),
    "just begun": ([BEGIN], {*CHANGES, "COMMIT", "ORIGIN"}),
    "just begun, to be prepared": ([BEGIN_PREPARE], {*CHANGES, "PREPARE", "ORIGIN"}),
    "a first block": ([FIRST_BLOCK], {"STREAM STOP", "ORIGIN"}),
    "a first block, after ORIGIN": ([FIRST_BLOCK, EVERYTHING["ORIGIN"]], {"STREAM STOP"}),
    "a further block": ([FIRST_BLOCK, STOP, BLOCK], {"STREAM STOP"}),
    **_after(BEGIN, ends_with="COMMIT"),
    **_after(BEGIN_PREPARE, ends_with="PREPARE"),
}
