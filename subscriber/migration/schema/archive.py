"""The definitions of a database, as an archive of pg_dump.

The password of the connection string is passed in the environment of pg_dump, and never as an argument. pg_restore
reads the file only: it prints the statements of chosen entries, and connects to no server.

An entry of `pg_restore --list` begins with three numbers: its number in the archive, and the catalog and the OID of the
object on the source. The names behind them are not parsed, because a name can contain blanks. The OIDs identify the
object in the catalogs of the source.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

import anyio
import asyncpg

from subscriber import server_features as features
from subscriber.catalog.connection import translate
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.defaults import complete
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import ConninfoError, SubscriberError
from subscriber.migration.schema.code_owners import ArchiveCode, EntryKey, read_code
from subscriber.migration.schema.programs import ClientPrograms
from subscriber.publisher.own_schema import OWN_SCHEMA
from subscriber.redaction import SECRETS
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, SYSTEM_ERROR

NAME = "subscriber migrate"
LOCK_TIMEOUT = 60  # seconds that pg_dump waits for the lock of a table
_PREFIX = "subscriber-schema-"
_UNLOCKED_FOR = 60  # seconds after which a directory without a lock belongs to no process
_ENTRY = re.compile(r"(\d+); (\d+) (\d+) (.+)")
# Keywords that this package handles itself, or that only matter for replication.
_NOT_PASSED = SECRETS | {"service", "replication", "client_encoding", "application_name", "fallback_application_name"}
_DEFAULTS = {("target_session_attrs", "any"), ("load_balance_hosts", "disable")}  # an older libpq has no such keywords
# A script of pg_restore begins with settings of the session, and newer versions wrap it in commands of psql.
_FIRST_OBJECT = "\n--\n-- Name: "
_PSQL_COMMAND = re.compile(r"^\\(?:un)?restrict \w+$", re.MULTILINE)
_TIMEOUT = re.compile(r"^SET \w+_timeout = 0;$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """An entry of the table of contents."""

    line: str  # as `pg_restore --list` prints it
    catalog: int  # OID of the catalog, for example 1259 for pg_class; 0: the entry is about no object of its own
    oid: int  # of the object on the source
    text: str  # kind, schema, name and owner, for messages

    @property
    def about(self) -> str:
        return self.text.rpartition(" ")[0] or self.text

    @property
    def key(self) -> EntryKey:
        return EntryKey(self.catalog, self.oid, "" if self.catalog else self.text)


@dataclass(frozen=True, slots=True)
class SchemaArchive:
    """An archive without rows. The file exists as long as the block of dump_schema()."""

    programs: ClientPrograms
    file: Path
    pre_data: tuple[ArchiveEntry, ...]
    post_data: tuple[ArchiveEntry, ...]
    code: ArchiveCode  # that the statements run

    async def script(self, entries: Sequence[ArchiveEntry], *, tablespaces: bool = True) -> str:
        """Return the statements of these entries, in the order of the archive's own dependencies.

        Args:
            entries: entries of one section.
            tablespaces: False: objects are created in the default tablespace.
        """
        with tempfile.NamedTemporaryFile("w", dir=self.file.parent, suffix=".list") as chosen:
            chosen.writelines(f"{entry.line}\n" for entry in entries)
            chosen.flush()
            options = [] if tablespaces else ["--no-tablespaces"]
            command = [self.programs.pg_restore, "--file=-", f"--use-list={chosen.name}", *options, str(self.file)]
            return _statements((await _run(command)).decode())


def _statements(script: str) -> str:
    """Return a script without commands of psql and time-outs, which the session sets as far as its server has them."""
    head, mark, rest = script.partition(_FIRST_OBJECT)
    head = _TIMEOUT.sub("", _PSQL_COMMAND.sub("", head))
    body, end, tail = rest.rpartition("\n--\n-- PostgreSQL database dump complete")
    return f"{head}{mark}{body}{end}{_PSQL_COMMAND.sub('', tail)}"


def statements_of(script: str) -> str:
    """Return the statements of a script for one entry, without the settings before them and without comments."""
    _, _, body = script.partition(_FIRST_OBJECT)
    _, _, body = body.partition("\n--\n")
    return body.rpartition("\n--\n-- PostgreSQL database dump complete")[0].strip()


@asynccontextmanager
async def dump_schema(source: str, programs: ClientPrograms) -> AsyncIterator[SchemaArchive]:
    """Read the definitions of a database, without those of schema "subscriber".

    Subscriptions are left out, and so are rows, large objects and statistics of the planner.

    Args:
        source: the connection string of the database.

    Raises:
        SubscriberError: pg_dump failed. The detail is its own message. Or the server cannot be reached.
        ConninfoError: the connection string has a secret that pg_dump can only take as an argument.

    Cancellation: ends pg_dump.
    """
    options = ["--format=custom", "--schema-only", "--no-subscriptions", f"--exclude-schema={OWN_SCHEMA}"]
    if features.DUMPED_STATISTICS.is_in_major(programs.major):
        options.append("--no-statistics")
    conninfo, environment = _connection(source)
    with _private_directory() as directory:
        file = directory / "schema.dump"
        limit = f"--lock-wait-timeout={LOCK_TIMEOUT * 1000}"
        command = [programs.pg_dump, *options, "--no-password", limit, f"--file={file}", f"--dbname={conninfo}"]
        connection = await connect(source, application_name=NAME, settings=NO_TIMEOUTS)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                snapshot = await connection.fetchval("SELECT pg_catalog.pg_export_snapshot()")
                await _run([*command, f"--snapshot={snapshot}"], environment)
                code = await read_code(connection)
        except asyncpg.PostgresError as error:
            raise translate(error) from error
        finally:
            connection.terminate()
        pre_data, post_data = [await _entries(programs, file, section) for section in ("pre-data", "post-data")]
        yield SchemaArchive(programs, file, pre_data, post_data, code)


@contextmanager
def _private_directory() -> Iterator[Path]:
    """Create a directory for the block, and remove those of processes that were killed.

    A process locks its directory. The lock ends with the process. A directory that was created a moment ago may not be
    locked yet, so it is not removed.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(path) as status:
            if status.st_uid == os.geteuid() and time() - status.st_mtime > _UNLOCKED_FOR:
                shutil.rmtree(path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory, _locked(Path(directory)):
        yield Path(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[os.stat_result]:
    """Lock a directory for the block. Raises OSError if it is locked, or no directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


async def _entries(programs: ClientPrograms, file: Path, section: str) -> tuple[ArchiveEntry, ...]:
    listed = (await _run([programs.pg_restore, "--list", f"--section={section}", str(file)])).decode()
    # Only this is an end of line to pg_restore. splitlines() also ends a line within a name.
    matches = (_ENTRY.fullmatch(line) for line in listed.split("\n") if not line.startswith(";"))
    return tuple(ArchiveEntry(entry[0], int(entry[2]), int(entry[3]), entry[4]) for entry in matches if entry)


def _connection(source: str) -> tuple[Conninfo, Mapping[str, str]]:
    """Return the connection string without secrets, and the environment that has the password."""
    parameters = complete(Conninfo.parse(source))
    secrets = sorted((SECRETS & parameters.keys()) - {"password"})
    if secrets:
        raise ConninfoError(
            f'connection option "{secrets[0]}" cannot be passed to pg_dump',
            detail="pg_dump takes it as an argument only, which every user of this machine can read.",
            hint="Use a key without a passphrase, or another method of authentication.",
            sqlstate=FEATURE_NOT_SUPPORTED,
        )
    given = {keyword: value for keyword, value in parameters.items() if (keyword, value) not in _DEFAULTS}
    conninfo = Conninfo({keyword: value for keyword, value in given.items() if keyword not in _NOT_PASSED})
    environment = {name: value for name, value in os.environ.items() if name not in ("PGSERVICE", "PGOPTIONS")}
    environment |= {"PGAPPNAME": NAME, "PGCLIENTENCODING": "UTF8", "LC_ALL": "C"}
    if "password" in parameters:
        environment["PGPASSWORD"] = parameters["password"]
    return conninfo, environment


async def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> bytes:
    done = await anyio.run_process(command, check=False, env=environment)
    if done.returncode != 0:
        raise SubscriberError(
            f"{Path(command[0]).name} failed with status {done.returncode}",
            detail=done.stderr.decode(errors="replace").strip(),
            sqlstate=SYSTEM_ERROR,
        )
    return done.stdout
