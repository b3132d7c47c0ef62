"""ComparisonState: the results of the tables that are compared, in a file, so that a comparison can be resumed.

The file has the keys of rows that differ, so only its owner can read it. It is replaced as a whole after each group of
tables. A comparison that is killed leaves the file of the last group that has ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from subscriber.comparison.result import ComparedRows, Key, TableComparison
from subscriber.errors import StatementError
from subscriber.lsn import optional_lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE
from subscriber.subscription import Subscription

FORMAT = "subscriber verify 2"


@dataclass(slots=True)
class ComparisonState:
    """The results in a file.

    Attributes:
        path: the file.
        subscription: the OID, the name and the rules of ownership of the subscription.
        tables: the results, in the order in which they were obtained.
    """

    path: Path
    subscription: tuple[int, str, str]
    tables: list[TableComparison] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, subscription: Subscription) -> ComparisonState:
        """Read the file. A file that does not exist has no results.

        Raises:
            StatementError: the file cannot be read, or has the results of another subscription.
        """
        state = cls(path, (subscription.oid, subscription.name, subscription.source_tag))
        try:
            stored = json.loads(path.read_text())
            identity = (stored["format"], (stored["oid"], stored["subscription"], stored["source_tag"]))
            state.tables = [_restored(table) for table in stored["tables"]]
        except FileNotFoundError:
            return state
        except OSError as error:
            raise StatementError(f'file "{path}" cannot be read', detail=str(error.strerror)) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _unusable(path, "It is damaged, or was not written by subscriber verify.") from error
        if identity != (FORMAT, state.subscription):
            raise _unusable(path, "It has the results of another subscription, or of other rules of ownership.")
        return state

    def add(self, tables: Sequence[TableComparison]) -> None:
        """Add results, and write the file.

        Raises:
            StatementError: the file cannot be written.
        """
        self.tables += tables
        oid, name, source_tag = self.subscription
        content = {
            "format": FORMAT,
            "oid": oid,
            "subscription": name,
            "source_tag": source_tag,
            "tables": [_stored(table) for table in self.tables],
        }
        temporary = self.path.with_name(f"{self.path.name}.new")
        try:
            temporary.unlink(missing_ok=True)
            # Others may write to the directory. A file or link of theirs is not followed.
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            raise StatementError(f'file "{self.path}" cannot be written', detail=str(error.strerror)) from error

    def remove(self) -> None:
        """Remove the file, because all tables are compared."""
        self.path.unlink(missing_ok=True)


def _stored(table: TableComparison) -> dict[str, Any]:
    value = asdict(table)
    for lsn in ("lsn", "since"):
        value[lsn] = None if value[lsn] is None else str(value[lsn])
    value["changed"] = list(table.changed.items())
    return value


def _restored(value: dict[str, Any]) -> TableComparison:
    def keys(found: list[list[str | None]]) -> list[Key]:
        return [tuple(key) for key in found]

    return TableComparison(
        **{
            **value,
            "key": tuple(value["key"]),
            "missing": keys(value["missing"]),
            "extra": keys(value["extra"]),
            "changed": {tuple(key): tuple(columns) for key, columns in value["changed"]},
            "compared": ComparedRows(value["compared"]),
            "lsn": optional_lsn(value["lsn"]),
            "since": optional_lsn(value["since"]),
        }
    )


def _unusable(path: Path, detail: str) -> StatementError:
    return StatementError(
        f'file "{path}" cannot be resumed',
        detail=detail,
        hint="Name another file, or remove this one.",
        sqlstate=INVALID_PARAMETER_VALUE,
    )
