"""Hypothesis strategies for every message that encode() can write."""

from __future__ import annotations

from hypothesis import strategies as st

from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, StandbyStatus, XLogData
from subscriber.protocol.decode import Decoder
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
    Relation,
    RelationColumn,
    ReplicaIdentity,
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
from subscriber.protocol.tuple_data import TupleData

u32 = st.integers(0, 2**32 - 1)
xids = st.integers(1, 2**32 - 1)
prefixes = st.none() | xids
lsns = st.integers(0, 2**64 - 1).map(Lsn)
set_lsns = st.integers(1, 2**64 - 1).map(Lsn)
times = st.integers(-(2**63), 2**63 - 1)
strings = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)

# Short ones, and ones whose length takes two bytes.
values = st.binary(max_size=20) | st.integers(250, 600).map(lambda n: b"v" * n)
columns = st.one_of(
    st.tuples(st.sampled_from([b"n", b"u"]), st.none()),
    st.tuples(st.sampled_from([b"t", b"b"]), values),
)
split_rows = st.lists(columns, max_size=12).map(lambda row: (b"".join(s for s, _ in row), [v for _, v in row]))
rows = split_rows.map(lambda row: TupleData.join(*row))

relation_columns = st.builds(RelationColumn, st.booleans(), strings, u32, st.integers(-(2**31), 2**31 - 1))
prepared = (set_lsns, set_lsns, times, xids, strings)

MESSAGES: dict[str, st.SearchStrategy[Message]] = {
    "BEGIN": st.builds(Begin, set_lsns, times, u32),
    "COMMIT": st.builds(Commit, lsns, lsns, times),
    "ORIGIN": st.builds(Origin, lsns, strings),
    "RELATION": st.builds(
        Relation,
        prefixes,
        u32,
        strings,
        strings,
        st.sampled_from(ReplicaIdentity),
        st.lists(relation_columns, max_size=5).map(tuple),
    ),
    "TYPE": st.builds(Type, prefixes, u32, strings, strings),
    "INSERT": st.builds(Insert, prefixes, u32, rows),
    "UPDATE": st.one_of(
        st.builds(Update, prefixes, u32, st.none(), st.none(), rows),
        st.builds(Update, prefixes, u32, st.sampled_from(OldPart), rows, rows),
    ),
    "DELETE": st.builds(Delete, prefixes, u32, st.sampled_from(OldPart), rows),
    "TRUNCATE": st.builds(Truncate, prefixes, st.booleans(), st.booleans(), st.lists(u32, max_size=5).map(tuple)),
    "MESSAGE": st.builds(LogicalMessage, prefixes, st.booleans(), lsns, strings, st.binary(max_size=20)),
    "STREAM START": st.builds(StreamStart, xids, st.booleans()),
    "STREAM STOP": st.just(StreamStop()),
    "STREAM COMMIT": st.builds(StreamCommit, u32, lsns, lsns, times),
    "STREAM ABORT": st.builds(StreamAbort, u32, u32, st.none(), st.none())
    | st.builds(StreamAbort, u32, u32, lsns, times),
    "BEGIN PREPARE": st.builds(BeginPrepare, *prepared),
    "PREPARE": st.builds(Prepare, *prepared),
    "COMMIT PREPARED": st.builds(CommitPrepared, *prepared),
    "ROLLBACK PREPARED": st.builds(RollbackPrepared, set_lsns, set_lsns, times, times, u32, strings),
    "STREAM PREPARE": st.builds(StreamPrepare, *prepared),
}
messages = st.one_of(*MESSAGES.values())

frames = st.one_of(
    st.builds(XLogData, lsns, lsns, times, st.binary(min_size=1, max_size=50)),
    st.builds(Keepalive, lsns, times, st.booleans()),
)
statuses = st.builds(StandbyStatus, lsns, lsns, lsns, times, st.booleans())


def decoder_for(message: Message) -> Decoder:
    """Return a decoder in the state for the bytes that encode() returns for `message`."""
    parallel = isinstance(message, StreamAbort) and message.abort_lsn is not None
    return Decoder(parallel=parallel, in_block=getattr(message, "xid", None) is not None)
