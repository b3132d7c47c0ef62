"""The protocol's rules, one example each. The bytes are in hexadecimal, as on the wire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol import copy_data
from subscriber.protocol.copy_data import Keepalive, StandbyStatus, XLogData
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldPart,
    Origin,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    StreamAbort,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from subscriber.protocol.reader import Reader
from subscriber.protocol.tuple_data import MAX_COLUMNS, TupleData

LSN_1, LSN_2, TIME = "0000000000000001", "0000000000000002", "0002b4c07a1d3f10"


def decode(text: str, **state: bool) -> Message:
    return Decoder(**state).decode(bytes.fromhex(text))


def test_times_are_microseconds_since_2000() -> None:
    begin = decode(f"42 0000000001567ca8 {TIME} 000002e5")
    assert begin == Begin(Lsn.parse("0/1567CA8"), 761688728878864, 741)
    assert isinstance(begin, Begin)
    assert datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=begin.commit_time) == datetime(
        2024, 2, 19, 20, 12, 8, 878864, tzinfo=UTC
    )


def test_a_row_tells_null_from_empty_and_from_not_sent() -> None:
    insert = decode("49 00004001 4e 0004 74 00000001 31 6e 74 00000000 75")
    assert isinstance(insert, Insert)
    assert (insert.xid, insert.relid, insert.new.ncols) == (None, 0x4001, 4)
    assert insert.new.split() == (b"tntu", [b"1", None, b"", None])


def test_a_changed_key_comes_with_the_old_key() -> None:
    update = decode("55 00004001 4b 0002 74 00000001 31 6e 4e 0002 74 00000001 32 75")
    assert isinstance(update, Update)
    assert update.old_part is OldPart.KEY
    assert update.old is not None
    assert update.old.split() == (b"tn", [b"1", None])  # columns outside the key are NULL
    assert update.new.split() == (b"tu", [b"2", None])  # u: unchanged TOAST, keep the target's value


def test_replica_identity_full_sends_the_whole_old_row() -> None:
    delete = decode("44 00004001 4f 0001 62 00000002 0001")
    assert isinstance(delete, Delete)
    assert delete.old_part is OldPart.ROW
    assert delete.old.split() == (b"b", [b"\0\1"])


def test_an_empty_namespace_is_pg_catalog() -> None:
    of_type = Type(None, 20000, "", "int4")
    relation = Relation(None, 1, "", "pg_class", ReplicaIdentity.NOTHING, ())
    assert of_type.schema == relation.schema == "pg_catalog"
    assert encode(of_type) == bytes.fromhex("59 00004e20 00 696e743400")


def test_a_relation_names_its_columns_in_the_order_of_its_rows() -> None:
    columns = "0002 01 696400 00000017 ffffffff 00 6e616d6500 00000413 00000024"
    assert decode(f"52 00004001 7300 7400 64 {columns}") == Relation(
        xid=None,
        relid=0x4001,
        namespace="s",
        name="t",
        replica_identity=ReplicaIdentity.DEFAULT,
        columns=(RelationColumn(True, "id", 23, -1), RelationColumn(False, "name", 1043, 36)),
    )


def test_names_that_are_not_utf8_keep_their_bytes() -> None:
    data = bytes.fromhex("4f 0000000000000000 e42e00")
    origin = Decoder().decode(data)
    assert origin == Origin(Lsn(0), "\udce4.")
    assert encode(origin) == data


def test_only_inside_a_block_a_change_begins_with_its_xid() -> None:
    decoder = Decoder()
    change = bytes.fromhex("000002e6 4e 0001 6e")  # an xid or a relid: the bytes do not distinguish them
    outside = b"I" + change
    inside = b"I" + bytes.fromhex("000002e7") + change
    assert decoder.decode(outside) == Insert(None, 0x2E6, TupleData(b"n", 1))
    assert decoder.decode(bytes.fromhex("53 000002e5 01")) == StreamStart(0x2E5, first_segment=True)
    assert decoder.in_block
    assert decoder.decode(inside) == Insert(0x2E7, 0x2E6, TupleData(b"n", 1))
    with pytest.raises(ProtocolError):
        decoder.decode(outside)
    assert decoder.decode(bytes.fromhex("53 000002e8 00")) == StreamStart(0x2E8, first_segment=False)
    assert decoder.decode(b"E") == StreamStop()
    assert decoder.decode(outside) == Insert(None, 0x2E6, TupleData(b"n", 1))


def test_an_origin_in_a_block_has_no_xid() -> None:
    origin = Origin(Lsn(0), "upstream")
    assert Decoder(in_block=True).decode(encode(origin)) == origin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"54 {1:08x} {2:08x} 03 {9:08x} {8:08x}", Truncate(1, True, True, (9, 8))),
        (f"4d {1:08x} 01 {LSN_1} 7000 {1:08x} ff", LogicalMessage(1, True, Lsn(1), "p", b"\xff")),
        (f"59 {1:08x} {7:08x} 7300 7400", Type(1, 7, "s", "t")),
        (f"55 {1:08x} {7:08x} 4e 0000", Update(1, 7, None, None, TupleData(b"", 0))),
        (f"44 {1:08x} {7:08x} 4b 0000", Delete(1, 7, OldPart.KEY, TupleData(b"", 0))),
    ],
)
def test_all_changes_in_a_block_have_an_xid(text: str, message: Message) -> None:
    assert decode(text, in_block=True) == message


def test_only_parallel_streaming_says_where_a_transaction_aborted() -> None:
    short, long = "41 00000001 00000002", f"41 00000001 00000002 {LSN_1} {TIME}"
    assert decode(short) == StreamAbort(1, 2, None, None)
    assert decode(long, parallel=True) == StreamAbort(1, 2, Lsn(1), 761688728878864)
    with pytest.raises(ProtocolError, match="16 bytes left over"):
        decode(long)
    with pytest.raises(ProtocolError, match="too short"):
        decode(short, parallel=True)


PREPARED = f"{LSN_1} {LSN_2} {TIME} 00000001 6700"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "message is empty"),
        ("5a", r'invalid logical replication message type "\?\?\? \(90\)"'),
        (f"42 {0:016x} {TIME} 00000001", "final_lsn is not set in BEGIN message"),
        (f"43 01 {LSN_1} {LSN_2} {TIME}", "unrecognized flags 1 in COMMIT message"),
        (f"63 00000001 01 {LSN_1} {LSN_2} {TIME}", "unrecognized flags 1 in STREAM COMMIT message"),
        (f"50 01 {PREPARED}", "unrecognized flags 1 in PREPARE message"),
        (f"4b 01 {PREPARED}", "unrecognized flags 1 in COMMIT PREPARED message"),
        (f"72 01 {LSN_1} {LSN_2} {TIME} {TIME} 00000001 6700", "unrecognized flags 1 in ROLLBACK PREPARED message"),
        (f"50 00 {LSN_1} {LSN_2} {TIME} 00000000 6700", "invalid two-phase transaction ID in PREPARE message"),
        (f"70 00 {LSN_1} {0:016x} {TIME} 00000001 6700", "end_lsn is not set in STREAM PREPARE message"),
        (f"62 {LSN_1} {LSN_2} {TIME} 00000001 67", "BEGIN PREPARE message has a string without an end"),
        ("53 00000001 02", "unrecognized first segment 2 in STREAM START message"),
        ("53 00000000 01", "invalid transaction ID in streamed replication transaction"),
        ("45 00", "STREAM STOP message has 1 bytes left over"),
        ("54 00000001 04 00000001", "unrecognized flags 4 in TRUNCATE message"),
        (f"4d 02 {LSN_1} 00 00000000", "unrecognized flags 2 in MESSAGE message"),
        ("52 00000001 00 00 78 0000", "unrecognized replica identity 'x' in RELATION message"),
        ("52 00000001 00 00 64 0001 02 00 00000000 00000000", "unrecognized column flags 2 in RELATION message"),
        ("49 00000001 4b 0000", "expected the row marker N in INSERT message, got 'K'"),
        ("55 00000001 00 0000", "expected the row marker N, O or K in UPDATE message, got '\\\\x00'"),
        ("55 00000001 4b 0000 4b 0000", "expected the row marker N in UPDATE message, got 'K'"),
        ("44 00000001 4e 0000", "expected the row marker O or K in DELETE message, got 'N'"),
        ("49 00000001 4e 0001 78", "unrecognized data representation type 'x'"),
        ("49 00000001 4e 0001 74 00000002 31", "INSERT message is too short"),
        ("55 00000001 4e 0001 74 00000002 31", "UPDATE message is too short"),
        ("44 00000001 4b 0001 74 00000002 31", "DELETE message is too short"),
        ("49 00000001 4e 0002 6e", "INSERT message is too short"),
        ("49 00000001 4e 0001 6e 6e", "INSERT message has 1 bytes left over"),
        ("55 00000001 4e 0001 6e 6e", "UPDATE message has 1 bytes left over"),
        ("44 00000001 4b 0001 6e 6e", "DELETE message has 1 bytes left over"),
    ],
)
def test_each_kind_of_damage_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{complaint}"):
        decode(text)


@pytest.mark.parametrize("text", ["49", "55", "44", "59"])
def test_a_change_in_a_block_has_a_valid_xid(text: str) -> None:
    with pytest.raises(ProtocolError, match="invalid transaction ID in streamed replication transaction"):
        decode(f"{text} 00000000 00000001 4e 0000", in_block=True)


def test_errors_carry_no_value_of_a_row() -> None:
    for text in ("49 00000001 4e 0001 74 00000007 7365637265", "49 00000001 4e 0001 74 00000006 736563726574 00"):
        with pytest.raises(ProtocolError) as caught:
            decode(text)
        assert "secre" not in str(caught.value)


def test_a_commit_has_two_positions() -> None:
    commit = decode(f"43 00 {LSN_1} {LSN_2} {TIME}")
    assert commit == Commit(Lsn(1), Lsn(2), 761688728878864)  # of the record, and after it


@pytest.mark.parametrize(
    ("status", "values"),
    [(b"n", [b"x"]), (b"u", [b"x"]), (b"t", [None]), (b"x", [b"x"]), (b"tt", [b"x"]), (b"n" * (MAX_COLUMNS + 1), [])],
)
def test_a_row_cannot_be_built_of_parts_that_do_not_fit(status: bytes, values: list[bytes | None]) -> None:
    with pytest.raises(ValueError, match=r"column|shorter"):
        TupleData.join(status, values)


def test_a_name_with_a_nul_byte_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="NUL"):
        encode(Origin(Lsn(0), "a\0b"))


def test_the_envelope_of_a_change() -> None:
    frame = bytes.fromhex(f"77 {LSN_1} {LSN_2} {TIME} 45")
    assert copy_data.decode_from_publisher(frame) == XLogData(Lsn(1), Lsn(2), 761688728878864, b"E")
    assert Decoder(in_block=True).decode(frame, copy_data.XLOG_DATA_HEADER.size) == StreamStop()


def test_a_keepalive_can_ask_for_an_answer() -> None:
    frame = bytes.fromhex(f"6b {LSN_1} {TIME} 01")
    assert copy_data.decode_from_publisher(frame) == Keepalive(Lsn(1), 761688728878864, reply_requested=True)


def test_a_status_update_is_34_bytes() -> None:
    status = StandbyStatus(write=Lsn(3), flush=Lsn(2), apply=Lsn(1), time=0, reply_requested=False)
    assert copy_data.encode(status).hex() == f"72{3:016x}{LSN_2}{LSN_1}{0:016x}00"


def test_unknown_messages_of_a_publisher_are_ignored_as_the_built_in_subscriber_does() -> None:
    assert copy_data.decode_from_publisher(bytes.fromhex("73 0000")) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        (f"77 {LSN_1} {LSN_1} {TIME}", "XLogData message is too short"),
        (f"6b {LSN_1} {TIME}", "keepalive message is too short"),
        (f"6b {LSN_1} {TIME} 01 00", "keepalive message has 1 bytes left over"),
        (f"6b {LSN_1} {TIME} 02", "unrecognized reply request 2 in keepalive message"),
    ],
)
def test_a_damaged_envelope_of_a_publisher(text: str, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        copy_data.decode_from_publisher(bytes.fromhex(text))


@pytest.mark.parametrize(("text", "complaint"), [("", "empty"), ("68", "unexpected message type 'h'")])
def test_a_damaged_envelope_of_a_subscriber(text: str, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        copy_data.decode_from_subscriber(bytes.fromhex(text))


def test_a_time_outside_of_64_bits_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="Keepalive"):
        copy_data.encode(Keepalive(Lsn(0), 2**63, reply_requested=False))


def test_a_reader_reads_numbers_of_any_size() -> None:
    read = Reader(bytes.fromhex("0102 000003"), "test")
    assert (read.uint(2), read.uint(3)) == (0x102, 3)
    read.finish()
