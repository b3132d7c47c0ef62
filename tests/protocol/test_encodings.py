"""Texts in the encodings of PostgreSQL's databases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol import frontend
from subscriber.protocol.encodings import CODECS, codec, decode, encode, is_text
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity

# Two characters, which the codec writes as one.
JOINED = "æ".encode("euc_jis_2004") + "\u0300".encode("euc_jis_2004")


@given(st.sampled_from(sorted(set(CODECS.values()))), st.binary(max_size=20))
def test_all_bytes_come_back(name: str, data: bytes) -> None:
    assert encode(decode(data, name), name) == data


def test_bytes_that_a_codec_would_write_otherwise_come_back() -> None:
    assert JOINED.decode("euc_jis_2004").encode("euc_jis_2004") != JOINED
    assert encode(decode(JOINED, "euc_jis_2004"), "euc_jis_2004") == JOINED


@pytest.mark.parametrize(
    ("encoding", "text", "data"),
    [
        ("UTF8", "é", b"\xc3\xa9"),
        ("LATIN1", "é", b"\xe9"),
        ("LATIN9", "€", b"\xa4"),
        ("WIN1252", "€", b"\x80"),
        ("KOI8R", "я", b"\xd1"),
        ("EUC_JP", "漢", b"\xb4\xc1"),
        ("EUC_TW", "\udcc4\udce3", b"\xc4\xe3"),
        ("SQL_ASCII", "é\udcff", b"\xc3\xa9\xff"),
    ],
)
def test_texts_of_each_encoding_are_decoded_and_encoded(encoding: str, text: str, data: bytes) -> None:
    assert decode(data, codec(encoding)) == text
    assert encode(text, codec(encoding)) == data
    assert is_text(text) == text.isprintable()
    assert frontend.query(text, codec(encoding))[5:-1] == data


def test_a_character_that_the_encoding_does_not_have() -> None:
    with pytest.raises(ProtocolError, match=r"U\+20AC has no equivalent") as refused:
        encode("10 €", codec("LATIN1"))
    assert refused.value.sqlstate == "22P05"


def test_an_encoding_that_no_database_has() -> None:
    with pytest.raises(ProtocolError, match='encoding "SJIS"'):
        codec("SJIS")


def test_a_relation_in_the_encoding_of_the_session() -> None:
    """Messages are decoded as UTF-8, because they do not name their encoding."""
    columns = (RelationColumn(True, "gr\udcf6\udcdfe", 23, -1),)
    sent = Relation(None, 1, "\udce4", "\udcfc", ReplicaIdentity.DEFAULT, columns)
    assert sent.recoded("utf-8") is sent
    read = sent.recoded("latin1")
    assert (read.namespace, read.name, read.columns[0].name) == ("ä", "ü", "größe")
