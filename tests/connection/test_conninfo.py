from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subscriber.connection import defaults
from subscriber.connection.conninfo import Conninfo
from subscriber.errors import ConninfoError
from subscriber.redaction import HIDDEN, KEYWORDS
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
    """Return the parameters, or the error message, as Libpq.parse() does."""
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


def agree(mine: dict[str, str] | str, theirs: dict[str, str] | str) -> bool:
    """Compare with libpq, except for secrets in messages and possible secrets in a URI."""
    if isinstance(mine, str) and mine.startswith("invalid host or port in URI"):
        parsed = {} if isinstance(theirs, str) else theirs
        at = "@" in parsed.get("host", "") + parsed.get("dbname", "")
        return isinstance(theirs, str) or at or not is_port_list(parsed.get("port", ""))
    if isinstance(mine, str) and mine.startswith("URI scheme"):
        return isinstance(theirs, str)
    if isinstance(mine, str) and HIDDEN in mine:
        return isinstance(theirs, str) and mine.split('"')[0] == theirs.split('"')[0]
    return mine == theirs


def is_port_list(text: str) -> bool:
    return set(text) <= set("0123456789+-, ")


@needs_libpq
@pytest.mark.parametrize("text", PAIRS + URIS)
def test_reads_what_libpq_reads(libpq: Libpq, text: str) -> None:
    assert agree(ours(text), libpq.parse(text))


@needs_libpq
@given(
    text=st.lists(
        st.sampled_from(["host", "user", "port", "password", "zzz", "=", "=", " ", "\t", "'", "\\", "a", "5", "é"]),
        max_size=12,
    ).map("".join)
)
def test_any_pairs_read_as_libpq_reads_them(text: str) -> None:
    assert LIBRARY is not None
    assert agree(ours(text), Libpq(LIBRARY).parse(text))


@needs_libpq
@given(
    rest=st.lists(
        st.sampled_from(["a", "1", *":/?,@[]&== %", "%41", "%C3%A9", "%00", "user", "port", "host"]), max_size=14
    ).map("".join)
)
@example(rest="a?user=%")
def test_any_uri_is_read_as_libpq_reads_it(rest: str) -> None:
    assert LIBRARY is not None
    assert agree(ours("postgresql://" + rest), Libpq(LIBRARY).parse("postgresql://" + rest))


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
    ("text", "message"),
    [
        ("postgresql://me:hunter2%zz@here", 'invalid percent-encoded token: "********"'),
        ("postgresql://here?password=hunter2%zz", 'invalid percent-encoded token: "********"'),
        ("postgresql://here?password=hunter2 x", 'unexpected spaces found in "********", use percent-encoded spaces'),
        ("postgresql://here?password=a&hunter2", 'missing key/value separator "=" in URI query parameter: "********"'),
        ("postgresql://here?password=a&hunter2=x", 'invalid URI query parameter: "********"'),
        (
            "postgresql://here?password=a&hunter2=x=y",
            'extra key/value separator "=" in URI query parameter: "********"',
        ),
        (
            "postgresql://me:hunter2@[::1",
            'end of string reached when looking for matching "]" in IPv6 host address in URI: '
            '"postgresql://me:********@[::1"',
        ),
        ("postgresql://me:hunt/er2@[]", 'invalid host or port in URI: "postgresql://me:********@[]"'),
        ("postgresql://me:hunter2/x@here", 'invalid host or port in URI: "postgresql://me:********@here"'),
        ("postgresql://me:a@hunter2/b@here/db", 'invalid host or port in URI: "postgresql://me:********@here/db"'),
        ("postgresql://me:a@hunter2@here/db", 'invalid host or port in URI: "postgresql://me:********@here/db"'),
        ("postgresql://me@tenant:hunter2@here", 'invalid host or port in URI: "postgresql://me@tenant:********@here"'),
        ("postgresql://me:hunter2", 'invalid host or port in URI: "postgresql://me:********"'),
        ("postgresql://me@tenant:hunter2%zz@here", 'invalid percent-encoded token: "********"'),
        ("host=here password=a hunter2", 'missing "=" after "********" in connection info string'),
        ("host=here password=a\nhunter2", 'missing "=" after "********" in connection info string'),
        ("host=here password='a'hunter2'b'", 'missing "=" after "********" in connection info string'),
        ("host=here password='a' hunter2", 'missing "=" after "********" in connection info string'),
        ("host=here password=a hunter2=b", 'invalid connection option "********"'),
        ("host=here;password=a hunter2", 'missing "=" after "********" in connection info string'),
        ("host=here passwordhunter2", 'missing "=" after "********" in connection info string'),
        ("host=here password:hunter2", 'missing "=" after "********" in connection info string'),
        ("me:hunter2@here/db", 'missing "=" after "********" in connection info string'),
        ("me:hunter2", 'missing "=" after "********" in connection info string'),
        (" postgresql://me:hunter2@here/db", 'missing "=" after "********" in connection info string'),
        ("host=here password='hunter2", "unterminated quoted string in connection info string"),
        ("host=here password hunter2", 'missing "=" after "password" in connection info string'),
        ("host=here colour=hunter2", 'invalid connection option "colour"'),
        ("host=here colour user=me password=hunter2", 'missing "=" after "colour" in connection info string'),
    ],
)
def test_no_error_shows_a_password(text: str, message: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        Conninfo.parse(text)
    assert caught.value.message.startswith(message)
    assert "hunter2" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize("scheme", ["postgresql+", "mysql+asyncmy", "mysql", "http", "PostgreSQL", "postgre"])
def test_another_scheme_is_refused_by_its_name_alone(scheme: str) -> None:
    with pytest.raises(ConninfoError) as caught:
        Conninfo.parse(f"{scheme}://me:hunter2@here:5432/db?password=hunter2")
    assert caught.value.message == f'URI scheme "{scheme}" is not supported'
    assert caught.value.hint == "Use postgresql://… in place of it, or key=value pairs."


def test_a_parameter_can_be_replaced_but_not_made_up() -> None:
    conninfo = Conninfo.parse("host=here dbname=a")
    assert conninfo.with_(dbname="b", user="me").parameters == {"host": "here", "dbname": "b", "user": "me"}
    assert conninfo.parameters["dbname"] == "a"
    with pytest.raises(ConninfoError, match='invalid connection option "nosuch"'):
        conninfo.with_(nosuch="1")
