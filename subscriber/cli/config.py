"""The file of --config: the targets that --target can name.

    [targets.shop]
    dsn = "postgresql://app@db.example/shop"
    password = "$SHOP_PASSWORD"                 # or "@FILE", or the password itself
    apply_dsn = "postgresql://writer@db.example/shop"
    apply_password = "@/run/secrets/writer"

Only the targets that a command uses are resolved: the variables and files of the others need not exist.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import read_named, read_named_password
from subscriber.display import near_word, shell_word
from subscriber.errors import ConninfoError
from subscriber.redaction import HIDDEN, SECRETS, redact_conninfo
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_FILE, UNDEFINED_OBJECT

TARGETS = "targets"


@dataclass(frozen=True, slots=True)
class ConfiguredTarget:
    """The keys of one target, as they are written. `dsn` is required; an empty text means that a key is missing."""

    dsn: str = ""
    password: str = ""
    apply_dsn: str = ""
    apply_password: str = ""

    def connection(self) -> str:
        """Return the connection string of the target, with its password.

        Raises:
            ConninfoError: it is invalid, or its variable or file cannot be read.
        """
        return _with_password(self.dsn, self.password)

    def apply_connection(self) -> str | None:
        """Return the same for the role that applies changes. None: it is the role of connection()."""
        return _with_password(self.apply_dsn, self.apply_password) if self.apply_dsn else None

    def redacted(self) -> dict[str, str]:
        """Return the keys that are written. Variables and files are shown by name, and passwords are hidden."""
        shown = {key: getattr(self, key) for key in KEYS if getattr(self, key)}
        return {key: redact_conninfo(text) if "dsn" in key else _shown(text) for key, text in shown.items()}

    def has_password(self) -> bool:
        """Return True if a password itself is written in the file."""
        texts = (self.dsn, self.apply_dsn)
        literal = any(text and not _is_reference(text) for text in (self.password, self.apply_password))
        return literal or any(not _is_reference(text) and SECRETS & set(_parameters(text)) for text in texts)


KEYS = tuple(field.name for field in fields(ConfiguredTarget))


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration file and its problems. A file with problems is used by no command but `subscriber config`."""

    file: Path
    targets: Mapping[str, ConfiguredTarget]
    problems: tuple[ConninfoError, ...]

    def target(self, name: str) -> ConfiguredTarget:
        """Return a target by its name.

        Raises:
            ConninfoError: the file has a problem, or does not have the target.
        """
        if self.problems:
            raise self.problems[0]
        if name in self.targets:
            return self.targets[name]
        near = near_word(name, self.targets)
        raise ConninfoError(
            f'target "{name}" is not in configuration file "{self.file}"',
            hint=near
            or Remedy("see its targets with", f"subscriber --config {shell_word(str(self.file))} config show"),
            sqlstate=UNDEFINED_OBJECT,
        )


def read_config(file: Path) -> Config:
    """Read a configuration file.

    Raises:
        ConninfoError: the file cannot be read, or is not TOML.
    """
    import tomllib

    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            document = tomllib.load(stream)
    except OSError as error:
        raise unreadable(file, error) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConninfoError(f'configuration file "{file}" is not TOML: {error}') from None
    targets: dict[str, ConfiguredTarget] = {}
    problems = list(_read(file, document, targets))
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and any(target.has_password() for target in targets.values()):
        problems.append(
            ConninfoError(
                f'configuration file "{file}" has a password, and group or world access',
                detail="Permissions should be u=rw (0600) or less.",
                hint=Remedy(command=f"chmod 600 {shell_word(str(file))}"),
            )
        )
    return Config(file, targets, tuple(problems))


def unreadable(file: Path, error: OSError) -> ConninfoError:
    """Return the error of a file that cannot be opened."""
    return ConninfoError(f'could not open configuration file "{file}": {error.strerror}', sqlstate=UNDEFINED_FILE)


def unresolved(config: Config) -> Iterator[ConninfoError]:
    """Yield the problems of connection strings: variables and files that cannot be read, and invalid strings."""
    for name, target in config.targets.items():
        for resolve in (target.connection, target.apply_connection):
            try:
                resolve()
            except ConninfoError as error:
                error.context.append(f'target "{name}" of configuration file "{config.file}"')
                yield error


def _read(file: Path, document: dict[str, Any], targets: dict[str, ConfiguredTarget]) -> Iterator[ConninfoError]:
    """Store the targets of a document, and yield what is wrong with it."""
    yield from _unknown(file, "", document, (TARGETS,))
    tables = document.get(TARGETS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        yield ConninfoError(
            f'configuration file "{file}": a target is a table', hint='Write [targets.NAME], then dsn = "…".'
        )
        return
    for name, table in tables.items():
        yield from _unknown(file, f" in [{TARGETS}.{name}]", table, KEYS)
        known = {key: table[key] for key in KEYS if key in table}
        for key, value in known.items():
            if not isinstance(value, str):
                yield ConninfoError(f'configuration file "{file}": "{key}" in [{TARGETS}.{name}] is not a text')
        targets[name] = target = ConfiguredTarget(**{key: text for key, text in known.items() if isinstance(text, str)})
        if not target.dsn:
            yield ConninfoError(
                f'configuration file "{file}": "dsn" is missing in [{TARGETS}.{name}]',
                hint='Such as: dsn = "postgresql://user@host/database"',
            )


def _unknown(file: Path, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[ConninfoError]:
    for key in table:
        if key not in known:
            yield ConninfoError(
                f'configuration file "{file}": unknown key "{key}"{where}',
                hint=near_word(key, known) or f"Known keys: {', '.join(known)}.",
            )


def _is_reference(text: str) -> bool:
    """Return True if the text names a file or a variable."""
    return text.startswith(("@", "$"))


def _shown(password: str) -> str:
    return password if _is_reference(password) else HIDDEN


def _parameters(dsn: str) -> Mapping[str, str]:
    try:
        return Conninfo.parse(dsn).parameters
    except ConninfoError:
        return {} if redact_conninfo(dsn) == dsn else {"password": ""}


def _with_password(dsn: str, password: str) -> str:
    parsed = Conninfo.parse(read_named(dsn))
    return str(parsed.with_(password=read_named_password(password)) if password else parsed)
