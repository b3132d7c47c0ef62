"""Findings of the preflight, and waivers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from subscriber.errors import StatementError
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE


class Severity(StrEnum):
    """The effect of a finding on the move."""

    ERROR = "error"  # the move does not start
    WARNING = "warning"  # the move works, and something is different or left behind
    INFORMATION = "information"


class FixedOn(StrEnum):
    """The server on which the fix of a finding is executed."""

    SOURCE = "source"  # SQL
    TARGET = "target"  # SQL
    SHELL = "shell"


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """An obstacle of a move.

    Attributes:
        kind: the rule.
        object: the object that it is about, for example schema.table.
        severity: its consequence.
        message: the fact.
        why: the consequence for the move.
        fix: a statement or a command. None: there is none.
        fixed_on: where the fix is executed.
        is_waivable: False if the move cannot work without the fix.
    """

    kind: str
    object: str
    severity: Severity
    message: str
    why: str
    fix: str | None = None
    fixed_on: FixedOn = FixedOn.SOURCE
    is_waivable: bool = True

    @property
    def name(self) -> str:
        """Return the name for --waive."""
        return f"{self.kind}:{self.object}"


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """All findings, the errors first.

    Attributes:
        findings: those that were not waived.
        waived: those that were.
    """

    findings: tuple[PreflightFinding, ...]
    waived: tuple[PreflightFinding, ...] = ()

    @property
    def errors(self) -> tuple[PreflightFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)

    def require(self) -> None:
        """Raise StatementError if an error was neither fixed nor waived."""
        if not self.errors:
            return
        first = self.errors[0]
        names = ", ".join(error.name for error in self.errors)
        hint = f"Fix it on the {first.fixed_on}: {first.fix}" if first.fix else "Waive it."
        raise StatementError(
            f"the preflight has found obstacles of the move: {names}",
            detail=f"{first.name}: {first.message}. {first.why}.",
            hint=hint,
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def waive(findings: Sequence[PreflightFinding], names: Iterable[str]) -> PreflightResult:
    """Separate the waived findings from the others.

    Args:
        names: names of findings, without patterns.

    Raises:
        StatementError: no finding has that name, or the finding cannot be waived.
    """
    known = {finding.name: finding for finding in findings}
    wanted = set(names)
    for name in sorted(wanted):
        if name not in known:
            close = get_close_matches(name, known, 1)
            raise StatementError(
                f'there is no finding "{name}" to waive',
                hint=f"Perhaps you mean {close[0]}." if close else "subscriber migrate preflight prints the findings.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        if not known[name].is_waivable:
            raise StatementError(
                f'finding "{name}" cannot be waived',
                detail=f"{known[name].message}. {known[name].why}.",
                hint=known[name].fix,
                sqlstate=INVALID_PARAMETER_VALUE,
            )
    ordered = sorted(findings, key=lambda finding: list(Severity).index(finding.severity))
    return PreflightResult(
        tuple(finding for finding in ordered if finding.name not in wanted),
        tuple(finding for finding in ordered if finding.name in wanted),
    )
