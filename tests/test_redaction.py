"""No text shows a password of a connection string, and texts without a password are not changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import process_time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from subscriber import redaction
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.refusals import refusal_remedy
from subscriber.errors import ServerError, StatementError
from subscriber.redaction import HIDDEN, SECRETS, RedactedStatement, redact, redact_conninfo
from subscriber.sqlstate import INVALID_PASSWORD

MARK = "TopSecret"

TEXTS = [
    ("postgresql+asyncpg://app:TopSecret@host/db", "postgresql+asyncpg://app:********@host/db"),
    ("postgresql:/app:TopSecret@host/db", "postgresql:********@host/db"),
    ("postgresql://me@tenant:TopSecret@host/db", "postgresql://me@tenant:********@host/db"),
    ("postgresql://app:Top/TopSecret@host", "postgresql://app:********@host"),
    ("postgresql://app:Top@TopSecret@host/db", "postgresql://app:********@host/db"),
    ("postgresql://app:TopSecret", "postgresql://app:********"),
    ("'postgresql://app:12.TopSecret'", "'postgresql://app:********'"),
    ("'postgresql://app:Top TopSecret@host' is wrong", "'postgresql://app:********@host' is wrong"),
    ("postgresql://[app:TopSecret@host", "postgresql://[app:********@host"),
    ("postgresql://h?password=TopSecret&sslmode=require", "postgresql://h?password=********&sslmode=require"),
    ("app:TopSecret@host/db", "app:********@host/db"),
    ('could not use "host=h password=TopSecret": refused', 'could not use "host=h password=********": refused'),
    ("could not use 'host=h password=TopSecret', refused", "could not use 'host=h password=********', refused"),
    ("host=h password = 'Top TopSecret' user=u", "host=h password = ******** user=u"),
    ("host=h password=Top TopSecret user=u", "host=h password=******** user=u"),
    ("sslkey=k sslpassword=TopSecret", "sslkey=k sslpassword=********"),
    ("host=h passwort=TopSecret", "host=h passwort=********"),
    ("host=h password:TopSecret", "host=h password:********"),
    ("PGPASSWORD=TopSecret psql", "PGPASSWORD=********"),
    ("connect(password='TopSecret', host='h')", "connect(password=********, host='h')"),
    ('{"password": "TopSecret", "port": 1}', '{"password": ********, "port": 1}'),
    ("{'passwd': 'TopSecret', 'port': 1}", "{'passwd': ********, 'port': 1}"),
    (
        "Failing row contains (1, host=h password=TopSecret, {p}).\nThe next line.",
        "Failing row contains (1, host=h password=********\nThe next line.",
    ),
]

UNCHANGED = [
    'connection to server at "h" (10.0.0.1), port 5432 failed: FATAL:  password authentication failed for user "app"',
    "Access denied for user 'app'@'host' (using password: YES)",
    "method must be changed or set password_required=false in the subscription parameters.",
    "password_encryption = scram-sha-256",
    "status is served at http://127.0.0.1:8000/ and at http://[::1]:8000/.",
    "spark://host:7077, spark://host:7077: gone",
    'in URI: "postgresql://u@h:5432/db"',
    "postgresql://h1:5432,h2:5433/db?target_session_attrs=any",
    "10:23:45 me@here",
    "enter the password: now",
    'processing remote data for replication origin "pg_16389" in transaction 739, finished at 0/15',
    'missing "=" after "password" in connection info string',
    "host=h user=u password=******** dbname=d",
    "postgresql://u:********@h/d, and more",
]


@pytest.mark.parametrize(("text", "shown"), TEXTS)
def test_passwords_are_hidden_in_any_text(text: str, shown: str) -> None:
    assert redact(text) == redact(shown) == shown
    assert MARK not in redact_conninfo(text)
    assert MARK not in str(RedactedStatement(f"CREATE SUBSCRIPTION s CONNECTION '{text}' PUBLICATIN p"))


@pytest.mark.parametrize("text", UNCHANGED)
def test_texts_without_a_password_are_unchanged(text: str) -> None:
    assert redact(text) == text


def test_errors_are_redacted_when_they_are_made() -> None:
    conninfo = f"host=h password={MARK} dbname=d"
    ours = StatementError(f'no "{conninfo}"', detail=f"In {conninfo}.", hint=f"Not {conninfo}.")
    theirs = ServerError({"C": "P0001", "M": f'no "{conninfo}"', "D": conninfo, "H": conninfo, "W": conninfo})
    for error in (ours, theirs):
        assert MARK not in f"{error} {error!r} {error.args} {vars(error)}"
    assert ours.message == 'no "host=h password=******** dbname=d"'
    assert theirs.context == ["host=h password=******** dbname=d"]


# --- any password ---------------------------------------------------------------------------------

PIECES = st.lists(st.sampled_from([MARK, "a", "1", *" \t\n'\"\\@:/?&#%=,;.$[]{}()*é"]), max_size=8).map("".join)
PASSWORDS = st.tuples(PIECES, PIECES).map(MARK.join)
PLAIN = st.lists(st.sampled_from([MARK, "a", "1", *"@:/?&#%=;.$*é"]), max_size=8).map("".join).map(f"{MARK}{{}}".format)

AS_WRITTEN = [
    "postgresql://app:{}@host:5432/db?sslmode=require",
    "mysql+aiomysql://app:{}@host",
    "postgresql://me@tenant:{}@host/db",
    "app:{}@host/db",
    "host=h password={} dbname=d",
    "host=h password='{}' dbname=d",
    "dbname=d user=u password={}",
    "dbname=d user=u password='{}",
    "host=h sslpassword = {}",
    "host=h,password={}",
    "postgresql://host/db?password={}",
]


@pytest.fixture(params=[100, pytest.param(4000, marks=pytest.mark.soak)], ids="{} examples".format)
def many(request: pytest.FixtureRequest) -> settings:
    return settings(max_examples=request.param)


def test_a_connection_string_hides_any_password(many: settings) -> None:
    @many
    @given(written=st.sampled_from(AS_WRITTEN), password=PASSWORDS)
    def check(written: str, password: str) -> None:
        assume(not (written.startswith("app:") and password.startswith("//")))  # the URI app://…
        assert MARK not in redact_conninfo(written.format(password))

    check()


def test_a_good_connection_string_hides_any_secret(many: settings) -> None:
    @many
    @given(keyword=st.sampled_from(sorted(SECRETS)), password=PASSWORDS)
    def check(keyword: str, password: str) -> None:
        conninfo = Conninfo({"host": "h", keyword: password, "user": "u"})
        assert MARK not in redact_conninfo(str(conninfo))
        assert repr(conninfo) == f"Conninfo('host=h {keyword}={HIDDEN} user=u')"

    check()


def test_any_text_hides_a_password_without_blanks_and_quotes(many: settings) -> None:
    @many
    @given(
        around=st.sampled_from(["could not use {}", 'in "{}": no\nnext', "['{}', 1]", "({}).", "{}"]),
        written=st.sampled_from(AS_WRITTEN),
        password=PLAIN,
    )
    def check(around: str, written: str, password: str) -> None:
        shown = redact(around.format(written.format(password)))
        assert MARK not in shown
        assert redact(shown) == shown

    check()


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


UNCLOSED = "'{}".format
# Ways to quote a connection string, and the characters of a password that would end the quotes.
QUOTES: list[tuple[Callable[[str], str], str]] = [
    (literal, ""),
    ("'{}'".format, "'\\"),
    ("E'{}'".format, "'\\"),
    ("U&'{}'".format, "'\\"),
    ("N'{}'".format, "'"),
    ("$${}$$".format, "$"),
    ("'{}'x".format, ""),  # closed by a quote of the password
    (UNCLOSED, ""),
]


def test_a_statement_hides_any_password(many: settings) -> None:
    @many
    @given(quoting=st.sampled_from(QUOTES), written=st.sampled_from(AS_WRITTEN), password=PASSWORDS)
    def check(quoting: tuple[Callable[[str], str], str], written: str, password: str) -> None:
        quote, ending = quoting
        password = "".join(character for character in password if character not in ending)
        assume(not (written.startswith("app:") and password.startswith("//")))
        assume(not (quote == UNCLOSED and re.search(r"'[\s;]", password)))  # as good a statement as any
        statement = f"CREATE SUBSCRIPTION s CONNECTION {quote(written.format(password))} PUBLICATIN p"
        assert MARK not in str(RedactedStatement(statement))

    check()


@pytest.mark.parametrize("conninfo", [r"E'\160assword={}'", r"U&'\0070assword={}'", "U&'!0070assword={}' UESCAPE '!'"])
def test_escapes_do_not_hide_that_it_is_a_password(conninfo: str) -> None:
    assert MARK not in str(RedactedStatement(f"CREATE SUBSCRIPTION s CONNECTION {conninfo.format(MARK)} PUBLICATIN p"))


# --- positions ------------------------------------------------------------------------------------


def test_positions_of_a_statement_are_kept() -> None:
    sql = f"CREATE SUBSCRIPTION a CONNECTION 'password={MARK} user=u'; ALTER SUBSCRIPTION b CONNECTION 'u:{MARK}@h' x y"
    shown = RedactedStatement(sql)
    text = str(shown)
    secrets = [at + offset for at in (sql.index(MARK), sql.rindex(MARK)) for offset in range(len(MARK))]
    for position, character in enumerate(sql):
        if position in secrets:
            assert text[shown.position(position) :].startswith(HIDDEN)
        else:
            assert text[shown.position(position)] == character
    assert shown.position(len(sql)) == len(text)
    start = sql.index(MARK)
    assert shown.piece(start - 9, start + 3) == f"password={HIDDEN}"
    assert shown.piece(start + 3, start + 20) == f"{HIDDEN} user=u'; A"
    assert shown.piece(0, start) == sql[:start]


# --- time -----------------------------------------------------------------------------------------

# Repeated, each of them once took a time that grows with the square of the length, or with its third power.
WORST = [
    "password='a; ",
    "x='a user=b ",
    "://a:b/",
    ":/:",
    "a: ",
    "password = \"a' ",
    "pass ",
    "password\\'",
    "$a$",
    "'pass=''",
    "a.",
    "://",
    ":/a b@",
    "a@",
    " ",
]


def seconds(function: Callable[[str], object], text: str) -> float:
    began = process_time()
    function(text)
    return process_time() - began


def growth(function: Callable[[str], object], piece: str, length: int) -> float:
    """Return how many times as long a text of twice the length takes. The least of some attempts counts."""
    short, long = ("password " + piece * (size // len(piece)) for size in (length, 2 * length))
    ratios = (seconds(function, long) / max(seconds(function, short), 1e-6) for _ in range(10))
    return next((ratio for ratio in ratios if ratio < 3), 4)


@pytest.mark.parametrize("function", [redact, redact_conninfo, lambda text: str(RedactedStatement(text))])
@pytest.mark.parametrize("piece", WORST)
def test_the_time_is_linear_in_the_length(function: Callable[[str], object], piece: str) -> None:
    assert growth(function, piece, 8_000) < 3


@pytest.mark.parametrize("function", [redact, redact_conninfo])
def test_three_megabytes_are_redacted(function: Callable[[str], str]) -> None:
    assert growth(function, "password='a; ", 1_500_000) < 3


@given(text=st.lists(st.sampled_from([*SECRETS, "a", "x", ":", "/", "//", "'", '"', "=", "@", " ", "Pwd", "passwort"])))
def test_only_texts_without_a_secret_skip_the_redaction(text: list[str]) -> None:
    joined = "".join(text)
    hides = redaction._in_text(joined)
    assert not hides or any(part in joined.lower() for part in redaction._PARTS)


def test_the_hint_about_a_missing_password_has_none() -> None:
    remedy = refusal_remedy(INVALID_PASSWORD, "", {"user": "u"}, replication=True, has_password=False)
    assert remedy is not None
    assert remedy.map(redact) == remedy
