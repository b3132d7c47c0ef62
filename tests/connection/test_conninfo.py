from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subscriber.connection import defaults
from subscriber.connection.conninfo import KEYWORDS, Conninfo
from subscriber.errors import ConninfoError
from tests.connection.libpq import Libpq, library

LIBRARY = library()
needs_libpq = pytest.mark.skipif(
    LIBRARY is None, reason="libpq comes with the demo's PostgreSQL, which is not installed"
)


@pytest.fixture(scope="module")
def libpq() -> Libpq:
    assert LIBRARY is not None
    return Libpq(LIBRARY)


def ours(text: str) -> dict[str, str] | str:
    """The parameters, or the error message: what Libpq.parse() gives."""
    try:
        return dict(Conninfo.parse(text).parameters)
    except ConninfoError as error:
        return error.message


PAIRS = [
    "host=here port=5433 dbname=shop",
    "  host = here\tport\n=\n5433  ",
    r"password='it\'s a \\ secret' user=u\ v",
    "host='' user=me",
    "host= port=5433",
    r"user=trailing\ ",
    "user=trailing\\",
    "application_name='a''b'",
    "user='x'port=1",
    "requiressl=1",
    "requiressl=0",
    "user=a user=b",
    "",
    "foobar",
    "foo bar=1",
    "=x",
    "user='never closed",
    "user='never closed\\",
    "nosuch=1",
    "sslmode",
    "user= 'quoted after a blank'",
]

URIS = [
    "postgresql://",
    "postgres://",
    "postgres:///",
    "postgresql:///shop",
    "postgresql://here",
    "postgresql://here:5433",
    "postgresql://here:5433/shop",
    "postgresql://me@here/shop",
    "postgresql://me:secret@here:5433/shop",
    "postgresql://me:se%40cret%3A@here",
    "postgresql://me:@here",
    "postgresql://:secret@here",
    "postgresql://@here",
    "postgresql://me@",
    "postgresql://a:1,b:2,c/shop",
    "postgresql://a,b:2",
    "postgresql://[::1]:5433/shop",
    "postgresql://[::1],[fe80::2]:1/shop?sslmode=disable",
    "postgresql://[::1",
    "postgresql://[]",
    "postgresql://[::1]z",
    "postgresql://%2Fvar%2Frun/shop",
    "postgresql:///shop?host=/var/run&port=5433",
    "postgresql://:5433/shop",
    "postgresql://here:/shop",
    "postgresql://here?user=me",
    "postgresql://here?user=me&user=you",
    "postgresql://here?",
    "postgresql://here?user=me&",
    "postgresql://here?user=me&&port=1",
    "postgresql://here?  user = me & port  = 5433 ",
    "postgresql://here?user=me you",
    "postgresql://here? a b =1",
    "postgresql://here?ssl=true",
    "postgresql://here?ssl=false",
    "postgresql://here?requiressl=1",
    "postgresql://here?options=-c%20a%3Db%20-c%20c=d",
    "postgresql://here?options=-c%20a%3Db",
    "postgresql://here?nosuch=1",
    "postgresql://here?nosuch",
    "postgresql://here?u%73er=me",
    "postgresql://here?user=",
    "postgresql://%zz",
    "postgresql://%1",
    "postgresql://%",
    "postgresql://a%00b",
    "postgresql://a/%00",
    "postgresql://caf%C3%A9/caf%E9",
    "postgresql://me@you@here/shop",
    "postgresql://a/b/c?user=x/y",
    "postgresql://here:5433?user=me@home",
    "postgre://here",
    "PostgreSQL://here",
    " postgresql://here",
]


@needs_libpq
@pytest.mark.parametrize("text", PAIRS + URIS)
def test_reads_what_libpq_reads(libpq: Libpq, text: str) -> None:
    assert ours(text) == libpq.parse(text)


@needs_libpq
@given(
    text=st.lists(
        st.sampled_from(["host", "user", "port", "password", "zzz", "=", "=", " ", "\t", "'", "\\", "a", "5", "é"]),
        max_size=12,
    ).map("".join)
)
def test_any_pairs_read_as_libpq_reads_them(text: str) -> None:
    assert LIBRARY is not None
    assert ours(text) == Libpq(LIBRARY).parse(text)


@needs_libpq
@given(
    rest=st.lists(
        st.sampled_from(["a", "1", *":/?,@[]&== %", "%41", "%C3%A9", "%00", "user", "port", "host"]), max_size=14
    ).map("".join)
)
@example(rest="a?user=%")
def test_any_uri_is_read_as_libpq_reads_it(rest: str) -> None:
    assert LIBRARY is not None
    theirs = Libpq(LIBRARY).parse("postgresql://" + rest)
    mine = ours("postgresql://" + rest)
    if isinstance(mine, str) and "********" in mine:  # where libpq shows a password, we do not
        assert isinstance(theirs, str)
        assert mine.split('"')[0] == theirs.split('"')[0]
    else:
        assert mine == theirs


@needs_libpq
def test_keywords_and_their_variables_are_libpqs(libpq: Libpq) -> None:
    assert {keyword: defaults.variable(keyword) for keyword in KEYWORDS} == libpq.variables()


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(parameters=st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=6))
@example(parameters={"password": "it's \\ a 'secret' "})
def test_the_text_of_a_conninfo_reads_back_the_same(parameters: dict[str, str]) -> None:
    text = str(Conninfo(parameters))
    assert Conninfo.parse(text).parameters == parameters


@needs_libpq
@given(parameters=st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=3))
def test_libpq_reads_our_text_back_the_same(parameters: dict[str, str]) -> None:
    assert LIBRARY is not None
    assert Libpq(LIBRARY).parse(str(Conninfo(parameters))) == parameters


def test_no_secret_is_shown() -> None:
    conninfo = Conninfo.parse("user=me password=hunter2 sslpassword='hunter 2' host=here")
    assert conninfo.redacted() == "user=me password=******** sslpassword=******** host=here"
    assert "hunter" not in repr(conninfo)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:hunter2%zz@here",
        "postgresql://here?password=hunter2%zz",
        "postgresql://here?password=hunter2 x",
        "postgresql://me:hunter2@[::1",
    ],
)
def test_no_error_shows_a_password(text: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        Conninfo.parse(text)
    assert "hunter2" not in str(caught.value)


def test_a_parameter_can_be_replaced_but_not_made_up() -> None:
    conninfo = Conninfo.parse("host=here dbname=a")
    assert conninfo.with_(dbname="b", user="me").parameters == {"host": "here", "dbname": "b", "user": "me"}
    assert conninfo.parameters["dbname"] == "a"
    with pytest.raises(ConninfoError, match='invalid connection option "nosuch"'):
        conninfo.with_(nosuch="1")
