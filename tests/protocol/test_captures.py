"""Recordings of every supported version are decoded, and encoded to the same bytes."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TypeVar

import pytest

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
    ReplicaIdentity,
    StreamAbort,
    StreamCommit,
    StreamStart,
    Truncate,
    Type,
    Update,
)
from tests.captures import Capture, captures

pytestmark = pytest.mark.parametrize("capture", captures(), ids=lambda capture: capture.name)


Change = TypeVar("Change", Insert, Update, Delete)


@cache
def decoded(capture: Capture) -> list[Message]:
    decoder = Decoder(parallel=capture.parallel)
    return [decoder.decode(data) for _, data in capture.messages]


def of(capture: Capture, name: str, kind: type[Change]) -> list[Change]:
    """Return the changes of one kind to the table `name`."""
    relids = {message.relid for message in decoded(capture) if isinstance(message, Relation) and message.name == name}
    return [message for message in decoded(capture) if isinstance(message, kind) and message.relid in relids]


def test_a_decoded_message_encodes_to_the_same_bytes(capture: Capture) -> None:
    for message, (_, data) in zip(decoded(capture), capture.messages, strict=True):
        assert encode(message) == data


def test_every_row_fits_its_relation(capture: Capture) -> None:
    width: dict[int, int] = {}
    for message in decoded(capture):
        match message:
            case Relation(relid=relid, columns=columns):
                width[relid] = len(columns)
            case Insert(relid=relid, new=row) | Update(relid=relid, new=row) | Delete(relid=relid, old=row):
                status, values = row.split()
                assert len(status) == len(values) == row.ncols == width[relid]


def test_changes_have_an_xid_exactly_inside_blocks(capture: Capture) -> None:
    in_block = False
    for message in decoded(capture):
        if isinstance(message, StreamStart):
            in_block = True
        elif message.message_type == "STREAM STOP":
            in_block = False
        elif isinstance(message, Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage):
            assert (message.xid is not None) == in_block


def test_the_recording_holds_what_its_options_ask_for(capture: Capture) -> None:
    options = capture.options
    expected = set("BCRYIUDT")
    if options.get("streaming"):
        expected |= set("SEcA")
    if options.get("two_phase"):
        expected |= set("bPKr")
    if options.get("streaming") and options.get("two_phase"):
        expected |= {"p"}
    if options.get("messages"):
        expected |= {"M"}
    if options.get("origin") != "none":
        expected |= {"O"}
    assert Counter(chr(data[0]) for _, data in capture.messages).keys() == expected


def test_the_position_after_a_commit_is_behind_the_commit(capture: Capture) -> None:
    for message, (lsn, _) in zip(decoded(capture), capture.messages, strict=True):
        if isinstance(message, Commit | StreamCommit):
            assert message.commit_lsn < message.end_lsn == lsn


def test_commit_repeats_the_position_of_its_begin(capture: Capture) -> None:
    framing = [message for message in decoded(capture) if isinstance(message, Begin | Commit)]
    for begin, commit in zip(framing[::2], framing[1::2], strict=True):
        assert isinstance(begin, Begin)
        assert isinstance(commit, Commit)
        assert begin.final_lsn == commit.commit_lsn
        assert begin.commit_time == commit.commit_time


def test_a_changed_key_comes_with_the_old_key_and_only_then(capture: Capture) -> None:
    updates = of(capture, "plain", Update)
    kept, changed = updates[:2]
    assert kept.old_part is None
    assert kept.old is None
    assert changed.old_part is OldPart.KEY
    assert changed.old is not None
    status, values = changed.old.split()
    assert status[1:] == b"nn"  # columns outside the key are NULL
    assert values[0] in (b"3", b"\0\0\0\3")


def test_a_value_that_stayed_in_toast_is_not_sent(capture: Capture) -> None:
    update = of(capture, "plain", Update)[0]
    status, values = update.new.split()
    assert status[2:] == b"u"
    assert values[2] is None


def test_replica_identity_full_sends_the_old_row_with_its_toast_values(capture: Capture) -> None:
    update = of(capture, "whole", Update)[0]
    assert update.old_part is OldPart.ROW
    assert update.old is not None
    assert update.old.split()[1][1] == b"long" * 510
    assert update.new.split()[0][1:] == b"u"  # and yet the new row does not have it


def test_relations_say_their_identity_and_its_columns(capture: Capture) -> None:
    relations = {message.name: message for message in reversed(decoded(capture)) if isinstance(message, Relation)}
    identities = {name: relation.replica_identity for name, relation in relations.items()}
    assert identities["plain"] is ReplicaIdentity.DEFAULT
    assert identities["whole"] is ReplicaIdentity.FULL
    assert identities["other_key"] is ReplicaIdentity.INDEX
    keys = {name: [column.is_key for column in relation.columns] for name, relation in relations.items()}
    assert keys["plain"][:3] == [True, False, False]
    assert keys["whole"] == [True, True]
    assert keys["other_key"] == [False, True, False]
    assert keys["no_key"] == [False]
    assert keys["no_columns"] == []
    assert relations['a "quoted" näme'].schema == "Größe"
    assert "parted" in relations  # publish_via_partition_root


def test_only_types_that_are_not_built_in_are_named(capture: Capture) -> None:
    types = {message.name: message for message in decoded(capture) if isinstance(message, Type)}
    assert {"mood", "pair", "int4"} <= types.keys()
    assert types["int4"].namespace == ""  # the domain's base type
    assert types["int4"].schema == "pg_catalog"
    assert types["mood"].schema == "public"


def test_binary_rows_keep_text_where_a_type_cannot_send_binary(capture: Capture) -> None:
    insert = of(capture, "kinds", Insert)[0]
    status, values = insert.new.split()
    if capture.options.get("binary"):
        assert set(status) == set(b"bt")
        assert values[status.index(b"t")] == b"postgres=r/postgres"  # aclitem
        assert values[0] == (1).to_bytes(8, "big")
    else:
        assert set(status) == set(b"t")
        assert values[0] == b"1"
        assert values[6] == "tab\t 'quote' ☃".encode()


def test_one_truncate_names_all_its_tables(capture: Capture) -> None:
    cascade, restart = (
        message for message in decoded(capture) if isinstance(message, Truncate) and message.xid is None
    )
    assert (cascade.cascade, cascade.restart_identity, len(cascade.relids)) == (True, False, 3)
    assert (restart.cascade, restart.restart_identity, len(restart.relids)) == (False, True, 1)


def test_an_origin_has_a_position_only_when_the_commit_is_known(capture: Capture) -> None:
    for before, message in zip(decoded(capture), decoded(capture)[1:], strict=False):
        if isinstance(message, Origin):
            assert message.name == "upstream"
            assert str(message.origin_lsn) == ("16/B374D848" if isinstance(before, Begin) else "0/0")


def test_an_abort_has_a_position_only_with_parallel_streaming(capture: Capture) -> None:
    for message in decoded(capture):
        if isinstance(message, StreamAbort):
            assert (message.abort_lsn is not None) == (message.abort_time is not None) == capture.parallel


def test_messages_come_with_and_without_a_transaction(capture: Capture) -> None:
    messages = {message.prefix: message for message in decoded(capture) if isinstance(message, LogicalMessage)}
    if capture.options.get("messages"):
        assert not messages["not in a transaction"].transactional
        assert messages["in a transaction"].transactional
        assert messages["in a transaction"].content == b"\0\xff"
    else:
        assert not messages
