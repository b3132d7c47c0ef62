"""Passwords of connection strings do not appear in any output. Each password contains a marker.

See tests/spark/test_secrets.py for Spark, and tests/test_redaction.py for the redaction itself.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import quote

import anyio
import pytest

import subscriber
from subscriber import telemetry
from subscriber.cli import main
from subscriber.cli.commands import exec
from subscriber.cli.logs import LogFormat, configure
from subscriber.cli.messages import print_error
from subscriber.connection.conninfo import Conninfo
from subscriber.errors import ConninfoError, SubscriberError
from tests.cli.test_http_guard import request
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_forked import original
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.processes import command_line, family, popened

ROLE = "marked"
LOG_FORMATS = ("rich", "json", "postgres")

BROKEN = [
    f"mysql+asyncmy://app:{MARK}@127.0.0.1/db",
    f"mysql://app:{MARK}@127.0.0.1/db",
    f"postgresql://app:{MARK}%zz@127.0.0.1/db",
    f"postgresql://app:a/{MARK}@127.0.0.1/db",
    f"postgresql://app:a@{MARK}@127.0.0.1/db",
    f"postgresql://app@tenant:{MARK}@127.0.0.1/db",
    f"postgresql://app:{MARK}",
    f"postgresql://app:{MARK}@[::1/db",
    f"postgresql://127.0.0.1/db?password={MARK}%zz",
    f"postgresql://127.0.0.1/db?password=a&{MARK}=b",
    f"postgresql://127.0.0.1/db?passwort={MARK}",
    f"app:{MARK}@127.0.0.1/db",
    f"host=127.0.0.1 password=a {MARK}",
    f"host=127.0.0.1 password='a'{MARK}'",
    f"host=127.0.0.1 password='{MARK}",
    f"host=127.0.0.1 password:{MARK}",
    f"host=127.0.0.1 passwd={MARK}",
    f"host=127.0.0.1 port=1;password={MARK}",
    f"host=127.0.0.1 sslmode=require;password={MARK}",
    f"host=127.0.0.1 connect_timeout=1,password={MARK}",
    f"host=127.0.0.1 require_auth=password={MARK}",
    f"host=127.0.0.1 password={MARK} channel_binding=require",
    f"host=127.0.0.1 password={MARK} sslpassword={MARK} sslmode=verify-full sslrootcert=/nowhere",
]
# Broken so that only a place that expects a connection string knows where the password is.
IN_PLACE = [f"host=127.0.0.1 password=a\n{MARK}", f"host=127.0.0.1 password{MARK}"]
SPELLINGS = [
    "postgresql://app:{}@127.0.0.1:1/db",
    "postgres://app:{}@127.0.0.1:1/db?sslmode=disable",
    "postgresql+asyncpg://app:{}@127.0.0.1:1/db",
    "postgresql+psycopg://app:{}@127.0.0.1:1",
    "postgresql://app:{}@127.0.0.1:1,127.0.0.1:1/db",
    "postgresql://app:{}@[::1]:1/db",
    "postgresql://127.0.0.1:1/db?user=app&password={}",
    "mysql+asyncmy://app:{}@127.0.0.1:1/db",
    "host=127.0.0.1 port=1 password={}",
    "host=127.0.0.1 port=1 password = {} user=app",
    "password={} host=127.0.0.1,127.0.0.1 port=1 sslpassword={}",
    "host=127.0.0.1 port=1 passwort={}",
]
UNREACHABLE = [
    f"postgresql://app:{MARK}@127.0.0.1:1/db",
    f"postgresql://app:{MARK}%E9@127.0.0.1:1/db",
    f"host=127.0.0.1,127.0.0.1;password={MARK} port=1 password={MARK}",
    f"service=marked password={MARK}",
]


def not_marked(text: str) -> None:
    """Fail with the places of the mark."""
    places = [text[max(0, at - 60) : at + 20] for at in range(len(text)) if text.startswith(MARK, at)]
    assert not places, places


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], built_app: None) -> Callable[..., str]:
    """Run the command in this process: its exit status and all it has printed, searched for the mark."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["subscriber", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capfd.readouterr()
        not_marked(printed.out + printed.err)
        return f"{ended.value.code}\n{printed.out}{printed.err}"

    return run


def uses_of(dsn: str, folder: Path) -> list[list[str]]:
    """Return commands that take a connection string and end. Not those that start Spark or retry without end."""
    return [
        ["exec", "--target", dsn, "DROP SUBSCRIPTION s"],
        ["exec", "--target", "dbname=x", f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION"],
        ["status", "--target", dsn],
        ["status", "--json", "--target", dsn],
        ["check", "--target", dsn, "s"],
        ["check", "--json", "--target", dsn, "--source", dsn, "--publication", "p"],
        ["tail", "--source", dsn, "--publication", "p"],
        # As any other argument
        ["status", "--target", "host=127.0.0.1 port=1", dsn],
        ["run", "--target", "host=127.0.0.1 port=1", dsn],
        ["run", "--target", "host=127.0.0.1 port=1", "--log-format", dsn],
        ["run", "--target", "host=127.0.0.1 port=1", "--http", dsn],
        ["tail", "--source", "host=127.0.0.1 port=1", "--publication", "p", "--limit", dsn],
        ["archive", "--info", "--directory", dsn],
        ["status", "--target", f"@{dsn}"],
        ["archive", "--info", "--directory", str(folder / "log"), "--until", dsn],
        [dsn],
        ["exec", "--target", dsn, *f"ALTER SUBSCRIPTION s CONNECTION {dsn}".split(" ")],
    ]


@pytest.mark.parametrize("dsn", IN_PLACE)
def test_commands_where_a_connection_string_is_expected(command: Callable[..., str], dsn: str) -> None:
    for use in uses_of(dsn, Path())[:7]:
        assert command(*use)[0] in "13"


@pytest.mark.parametrize(
    "dsn", [pytest.param(dsn, marks=pytest.mark.soak if at % 3 else []) for at, dsn in enumerate(BROKEN)]
)
def test_commands_with_a_broken_connection_string(command: Callable[..., str], tmp_path: Path, dsn: str) -> None:
    for arguments in uses_of(dsn, tmp_path):
        assert command(*arguments)[0] in "123"
    assert command("run", "--target", dsn)[0] == "3"


@pytest.mark.parametrize(
    ("number", "seed"), [(20, 20), *(pytest.param(1000, seed, marks=pytest.mark.soak) for seed in range(20, 23))]
)
def test_random_commands_and_passwords(command: Callable[..., str], tmp_path: Path, number: int, seed: int) -> None:
    """A valid connection string in any place, or one with any password where a connection string is expected."""
    random = Random(seed)
    for _ in range(number):
        characters = random.choices(" '\"\\@:/?&#%=,;.$[]{}()*é1a", k=random.randrange(8))
        at = random.randrange(len(characters) + 1)
        password = "".join([*characters[:at], MARK, *characters[at:]])
        spelling = random.choice(SPELLINGS)
        quoted = "'" + password.replace("\\", "\\\\").replace("'", "\\'") + "'"
        is_valid = random.random() < 0.7
        valid = quote(password, safe="") if "://" in spelling else quoted
        uses = uses_of(spelling.replace("{}", valid if is_valid else password), tmp_path)
        assert command(*random.choice(uses if is_valid else uses[:7]))[0] in "0123"


@pytest.mark.parametrize("dsn", UNREACHABLE)
def test_commands_with_a_server_that_does_not_answer(command: Callable[..., str], tmp_path: Path, dsn: str) -> None:
    for arguments in uses_of(dsn, tmp_path):
        assert command(*arguments)[0] in "0123"


@pytest.mark.parametrize("dsn", [BROKEN[0], pytest.param(BROKEN[2], marks=pytest.mark.soak), UNREACHABLE[0]])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", "--log-format", log_format, "--target"] for log_format in LOG_FORMATS),
        ["archive", "-p", "p", "--directory", "log", "--log-format", "json", "--source"],
        ["status", "--watch", "--target"],
        ["status", "--watch", "--json", "--target"],
    ],
    ids=" ".join,
)
def test_commands_that_try_again(arguments: list[str], dsn: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "subscriber", *arguments, dsn]
    with popened(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path) as process:
        assert process.stdout is not None
        printed = ""
        while not any(reason in printed for reason in ("Connection refused", "URI scheme", "percent-encoded")):
            line = process.stdout.readline()
            assert line, printed
            printed += line
        process.terminate()
        printed += process.stdout.read()
    not_marked(printed)


@pytest.mark.parametrize("scheme", ["mysql+asyncmy", "mysql"])
def test_another_scheme_is_refused_in_a_sentence(command: Callable[..., str], scheme: str) -> None:
    said = command("status", "--target", f"{scheme}://app:{MARK}@h/db")
    assert said == (
        f'3\nERROR:  URI scheme "{scheme}" is not supported\n'
        "HINT:  Use postgresql://… in place of it, or key=value pairs.\n"
    )


def test_the_environment_is_shown_nowhere(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SUBSCRIBER_TARGET_DSN", "SUBSCRIBER_SOURCE_DSN"):
        monkeypatch.setenv(name, f"postgresql://app:{MARK}@127.0.0.1:1/db")
    monkeypatch.setenv("PGPASSWORD", MARK)
    for name in ("exec", "run", "status", "check", "tail", "archive", "lake", "verify", "demo"):
        assert "Usage" in command(name, "--help")
    assert "Usage" in command("--help")
    for arguments in (["status"], ["check", "s"], ["tail", "-p", "p"], ["exec", "DROP SUBSCRIPTION s"]):
        assert "Connection refused" in command(*arguments)
    file = tmp_path / "services"
    file.write_text(f"[broken]\nhost=h\npassword={MARK}\nnonsense {MARK}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    assert "syntax error in service file" in command("status", "--target", "service=broken")
    passwords = tmp_path / "passwords"
    passwords.write_text(f"nonsense:{MARK}\n127.0.0.1:1:*:*:{MARK}\n")
    passwords.chmod(0o644)
    assert "Connection refused" in command("status", "--target", f"host=127.0.0.1 port=1 passfile={passwords}")


# --- statements -----------------------------------------------------------------------------------

STATEMENTS = [
    f"CREATE SUBSCRIPTON s CONNECTION 'host=h password={MARK}' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTIN 'host=h password={MARK}' PUBLICATION p",
    f"CREATE SUBSCRIPTION s 'host=h password={MARK}' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION host=h password={MARK} PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION postgresql://app:{MARK}@h/db PUBLICATION p",
    f'CREATE SUBSCRIPTION s CONNECTION "host=h password={MARK}" PUBLICATION p',
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password={MARK} PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password=a'{MARK}' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password=a'{MARK}'b' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password='{MARK}' dbname=d' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password=' {MARK}' dbname=d' PUBLICATION p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password=a {MARK}' PUBLICATN p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password=''a {MARK}'' dbname=d' PUBLICATN p",
    f"CREATE SUBSCRIPTION s CONNECTION\n'host=h\npassword=a\n{MARK}' PUBLICATN p",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password={MARK}' PUBLICATION p WITH (x",
    f"CREATE SUBSCRIPTION s CONNECTION 'host=h password={MARK}' PUBLICATION p WITH (slot_name = 'y)",
    f"ALTER SUBSCRIPTION s CONNECTION 'postgresql://app:{MARK}@h/db' x",
    f"ALTER SUBSCRIPTION s CONNECTION $$postgresql://app:{MARK}@h/db$$ x",
    f"ALTER SUBSCRIPTION s CONNECTION $a$postgresql://app:{MARK}@h/db$$ x",
    f"ALTER SUBSCRIPTION s CONNECTION E'host=h password=\\'a {MARK}\\'' x",
    f"ALTER SUBSCRIPTION s CONNECTION U&'host=h password={MARK}'",
    f"ALTER SUBSCRIPTION s CONNECTION X'password={MARK}'",
    f"ALTER SUBSCRIPTION s SET (slot_name = 'postgresql://app:{MARK}@h/db', x x)",
    f'DROP SUBSCRIPTION "postgresql://app:{MARK}@h/db',
    f"DROP SUBSCRIPTION postgresql://app:{MARK}@h/db",
    f"postgresql://app:{MARK}@h/db",
    f"/* password={MARK}",
    f"SELECT dblink('host=h password={MARK}', 'SELECT 1')",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_refused_statement_shows_no_password(command: Callable[..., str], statement: str) -> None:
    assert command("exec", "--target", f"postgresql://app:{MARK}@127.0.0.1:1/db", statement)[0] == "3"


@pytest.mark.parametrize("column", [0, 20, 60, 200])
def test_the_caret_stays_under_its_word(column: int) -> None:
    """As it would stand under the same statement with a password of eight asterisks."""

    def shown(password: str) -> list[str]:
        words = f"ALTER SUBSCRIPTION{' ' * column} s CONNECTION 'host=h password={password} dbname=d' mistake"
        printed = io.StringIO()
        with pytest.raises(SubscriberError) as caught:
            asyncio.run(exec.execute_statements("", words, printed))
        print_error(caught.value, words, printed)
        return printed.getvalue().splitlines()

    message, line, caret = shown(MARK * 3)
    assert message == 'ERROR:  syntax error at or near "mistake"'
    assert line[caret.index("^") :].startswith("mistake")
    assert [message, line, caret] == shown("*" * 8) == shown("x")


# --- the library ----------------------------------------------------------------------------------

URLS = [
    f"mysql+aiomysql://app:a@{MARK}@127.0.0.1/db",
    f"mysql+aiomysql://app:{MARK}",
    f"nosuch+dialect://app:{MARK}@127.0.0.1/db",
    f"mysql+nosuch://app:{MARK}@127.0.0.1/db",
    f"//app:{MARK}@127.0.0.1/db",
    f"mysql+aiomysql://app:{MARK}@127.0.0.1:1/db",
    f"postgresql+asyncpg://app:{MARK}@127.0.0.1:1/db",
]


async def connected(dsn: str) -> None:
    async with subscriber.connect(dsn):
        pass


async def streamed(dsn: str) -> None:
    async with subscriber.stream(dsn, publications=["p"]):
        pass


async def consumed(dsn: str) -> None:
    await subscriber.consume(subscriber.Consumer(), dsn, publications=["p"], slot="s")


async def mirrored(dsn: str) -> None:
    await subscriber.mirror(dsn, slot="m", publications=["p"], target="sqlite+aiosqlite://")


@pytest.mark.parametrize("dsn", [*BROKEN, *IN_PLACE, *UNREACHABLE])
async def test_errors_of_the_library(dsn: str) -> None:
    for use in (connected, streamed, consumed, mirrored):
        with pytest.raises(SubscriberError) as caught:
            await use(dsn)
        not_marked("".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value)))


@pytest.mark.parametrize("url", URLS)
async def test_errors_of_other_databases(url: str, source_db: Database) -> None:
    with pytest.raises(SubscriberError) as caught:
        await subscriber.mirror(source_db.dsn(), slot="m", publications=["p"], target=url)
    not_marked("".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(caught.value))


# --- servers that ask for the password ------------------------------------------------------------


@dataclass
class Guarded:
    """Two databases whose role ROLE has the mark as its password, over TCP."""

    source: Database
    target: Database
    subscriptions: Subscriptions

    def pairs(self, database: Database, **parameters: str) -> str:
        return str(Conninfo.parse(database.server.dsn(database.name)).with_(user=ROLE, **parameters))

    def uri(self, database: Database, password: str = MARK) -> str:
        return database.server.dsn(database.name).replace("//postgres@", f"//{ROLE}:{password}@")


@pytest.fixture
async def guarded(source_db: Database, target_db: Database) -> AsyncIterator[Guarded]:
    servers = [source_db.server, target_db.server]
    files = {server.data / "pg_hba.conf": (server.data / "pg_hba.conf").read_text() for server in servers}
    for database in (source_db, target_db):
        await database.execute(f"CREATE ROLE {ROLE} LOGIN REPLICATION SUPERUSER PASSWORD '{MARK}'")
    for file, before in files.items():
        file.write_text(f"host all {ROLE} 127.0.0.1/32 scram-sha-256\n{before}")
    for database in (source_db, target_db):
        await database.server.reload()
        await database.wait_for(
            f"SELECT count(*) FROM pg_hba_file_rules WHERE user_name = '{{{ROLE}}}'",
            1,
        )
        await asyncio.sleep(0.2)  # until the postmaster has read it, too
        await database.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await source_db.execute("INSERT INTO t VALUES (1, 'x')", "CREATE PUBLICATION p FOR ALL TABLES")
    try:
        yield Guarded(source_db, target_db, Subscriptions(target_db))
        await Subscriptions(target_db).execute("DROP SUBSCRIPTION IF EXISTS s")
    finally:
        for file, before in files.items():
            file.write_text(before)
        for database in (source_db, target_db):
            await database.server.reload()
            await database.execute(f"DROP OWNED BY {ROLE} CASCADE", f"DROP ROLE {ROLE}")


async def printed(*arguments: str, **environment: str) -> str:
    """Run a command in a separate process. Returns its output."""
    done = await anyio.run_process(
        [sys.executable, "-m", "subscriber", *arguments],
        check=False,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    text = done.stdout.decode()
    not_marked(text)
    return text


async def test_a_refused_password_is_shown_nowhere(guarded: Guarded, tmp_path: Path) -> None:
    refused = f'password authentication failed for user "{ROLE}"'
    wrong = f"{MARK}wrong"
    passwords = tmp_path / "passwords"
    passwords.write_text(f"*:*:*:*:{wrong}\n")
    passwords.chmod(0o600)
    services = tmp_path / "services"
    services.write_text(f"[target]\n{guarded.pairs(guarded.target, password=wrong)}\n".replace(" ", "\n"))
    ways: list[tuple[str, dict[str, str]]] = [
        (guarded.uri(guarded.target, wrong), {}),
        (guarded.pairs(guarded.target, password=wrong), {}),
        (guarded.pairs(guarded.target, passfile=str(passwords)), {}),
        (guarded.pairs(guarded.target), {"PGPASSWORD": wrong}),
        ("service=target", {"PGSERVICEFILE": str(services)}),
    ]
    for dsn, environment in ways:
        assert refused in await printed("status", "--target", dsn, **environment)
    dsn, nothing = ways[0][0], {"PGPASSWORD": ""}
    assert refused in await printed("check", "--target", dsn, "--source", dsn, "-p", "p", **nothing)
    assert refused in await printed("tail", "--source", dsn, "-p", "p", **nothing)
    statement = f"CREATE SUBSCRIPTION s CONNECTION '{guarded.pairs(guarded.source, password=wrong)}' PUBLICATION p"
    assert refused in await printed("exec", "--target", guarded.uri(guarded.target), statement)


@pytest.mark.parametrize(
    "log_format",
    [pytest.param("rich", marks=pytest.mark.soak), pytest.param("postgres", marks=pytest.mark.soak), "json"],
)
@pytest.mark.prints_password("the target's own log has the error that the test's trigger raises")
async def test_a_subscription_that_works_and_then_does_not(guarded: Guarded, processes: Path, log_format: str) -> None:
    target = guarded.uri(guarded.target)
    create = f"CREATE SUBSCRIPTION s CONNECTION '{guarded.pairs(guarded.source, password=MARK)}' PUBLICATION p"
    await printed("exec", "--target", target, create)
    options = ["--http", "0", "--debug"]
    program = Program(target, processes / "run.log", log_format, options)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(original, "new_interpreter", True)  # the test reads the arguments of the program
            await program.start(r"http://127\.0\.0\.1:\d+/")
        port = int((await program.wait_for(r"http://127\.0\.0\.1:(\d+)/"))[1])
        await guarded.subscriptions.wait_for_sync(guarded.source)
        # A server's own error quotes a connection string, as those of dblink and postgres_fdw do.
        quoting = f"could not connect to host=h password={MARK} dbname=d"
        await guarded.target.execute(
            "CREATE FUNCTION quote() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" RAISE EXCEPTION '{quoting}' USING DETAIL = 'postgresql://u:{MARK}@h/d', HINT = '{quoting}'; END $$",
            "CREATE TRIGGER quote BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION quote()",
            "ALTER TABLE t ENABLE ALWAYS TRIGGER quote",
        )
        await guarded.source.execute("INSERT INTO t VALUES (2, 'y')")
        await guarded.target.wait_for("SELECT count(*) FROM subscriber.worker WHERE error LIKE '%password=***%'", 1)
        await everything_said(guarded, program, port, "could not connect to host=h password=******** dbname=d")
        await printed("check", "--json", "--target", target, "s")
        await guarded.target.execute("DROP TRIGGER quote ON t")
        await guarded.target.wait_for("SELECT count(*) FROM t", 2)
        # The publisher refuses.
        await guarded.source.execute(f"ALTER ROLE {ROLE} PASSWORD 'another'")
        await guarded.source.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{ROLE}'")
        await guarded.target.wait_for("SELECT count(*) > 0 FROM subscriber.worker WHERE error LIKE '%authentication%'")
        await everything_said(guarded, program, port, "password authentication failed")
        # The connection string is broken.
        await guarded.target.execute(f"UPDATE subscriber.subscription SET subconninfo = '{BROKEN[0]}'")
        await guarded.target.wait_for("SELECT count(*) FROM subscriber.worker WHERE error LIKE '%scheme%'", 1)
        await everything_said(guarded, program, port, 'URI scheme "mysql+asyncmy" is not supported')
        await guarded.source.execute(f"ALTER ROLE {ROLE} PASSWORD '{MARK}'")
        good = guarded.pairs(guarded.source, password=MARK)
        await printed("exec", "--target", target, f"ALTER SUBSCRIPTION s CONNECTION '{good}'")
        await guarded.subscriptions.wait_for_state("streaming")
    finally:
        program.kill()


async def everything_said(guarded: Guarded, program: Program, port: int, expected: str) -> None:
    """Search the log, the list of processes, the answers, the status and the catalog."""
    not_marked(program.text)
    assert program.pid is not None
    not_marked(repr([command_line(pid) for pid in family(program.pid)]))
    assert expected in await printed("status", "--target", guarded.uri(guarded.target))
    document = ""
    with anyio.fail_after(10):  # an answer is good for a second
        while expected not in document.replace('\\"', '"'):
            _, _, document = await request(port, "/status.json")
            not_marked(document)
            await anyio.sleep(0.1)
    for path in ("/", "/metrics", "/health"):
        not_marked((await request(port, path))[2])
    tables = await guarded.target.rows(
        "SELECT relname FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace AND relkind IN ('r', 'p')"
    )
    for (table,) in tables:
        columns = "to_jsonb(t) - 'subconninfo'" if table == "subscription" else "to_jsonb(t)"
        for (row,) in await guarded.target.rows(f"SELECT ({columns})::text FROM subscriber.{table} t"):
            not_marked(row)


# --- logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_no_log_format_shows_what_libraries_say(command: Callable[..., str], log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    logging.getLogger("uvicorn").warning("refused %s", f"http://me:{MARK}@h/")
    logging.getLogger("sqlalchemy").warning("engine of mysql+aiomysql://app:%s@h/db", MARK)
    try:
        raise ValueError(f"invalid DSN postgresql://app:{MARK}@h/db")
    except ValueError as error:
        logging.getLogger("asyncpg").warning("connect(password='%s')", MARK, exc_info=True)
        telemetry.log_error(error)
        telemetry.log_error(ExceptionGroup("several", [error]))
    telemetry.log(telemetry.ERROR, f"no {MARK}".replace(MARK, f"password={MARK}"), detail=f"u:{MARK}@h")
    assert "invalid DSN postgresql://app:********@h/db" in stream.getvalue()
    not_marked(stream.getvalue())


def test_a_bug_is_printed_without_passwords() -> None:
    script = f"""
import subscriber.cli.main as cli
def app():
    import logging
    logging.getLogger("x").warning("of postgresql://app:%s@h/db", "{MARK}")
    raise ValueError("no postgresql://app:" + "{MARK}" + "@h/db")
cli.app = app
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of postgresql://app:********@h/db\n" in done.stderr
    assert done.stderr.endswith("ValueError: no postgresql://app:********@h/db\n")


def test_objects_with_a_connection_string_do_not_show_it(command: Callable[..., str]) -> None:
    from subscriber.catalog.grammar.lexer import tokenize
    from subscriber.catalog.grammar.parser import parse
    from subscriber.subscription import Subscription

    dsn = f"host=h password={MARK}"
    create = f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p"
    shown: Sequence[object] = (
        Conninfo.parse(dsn),
        Subscription(1, "s", "me", dsn, ("p",)),
        parse(create),
        parse(f"ALTER SUBSCRIPTION s CONNECTION '{dsn}'"),
        tokenize(create),
        ConninfoError(dsn),
    )
    not_marked(repr(shown))
