"""The rules for commit messages, which the commit-msg hook checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.commit_message import main, problems

BODY = "\n\nA rejected batch named no row, so the log could not say which one.\n"


@pytest.mark.parametrize(
    "subject",
    [
        "targets: replay a rejected batch row by row",
        "worker/apply, catalog: pass settings",
        "README: bring the map of the code up to date",
        "Merge branch 'main'",
        'Revert "targets: replay a rejected batch row by row"',
        "fixup! targets: replay",
    ],
)
def test_a_subject_that_is_right(subject: str) -> None:
    assert problems(subject + BODY) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Replay a rejected batch" + BODY, "needs an area first"),
        ("targets: Replay a rejected batch" + BODY, "in lower case"),
        ("targets: replays a rejected batch" + BODY, 'not "replays"'),
        ("targets: replayed a rejected batch" + BODY, 'not "replayed"'),
        ("targets: replaying a rejected batch" + BODY, 'not "replaying"'),
        ("targets: replay " + "x" * 57 + BODY, "73 characters"),
        ("targets: replay it." + BODY, "full stop"),
        ("targets: replay it\nbecause a rejected batch names no row", "second line is empty"),
        ("targets: replay it", "says why"),
        ("targets: replay it\n\n# why it was necessary to do this, in a comment\n", "says why"),
        ("targets: replay it\n\n" + "why " * 26, "lines of the body"),
        ("", "needs an area first"),
    ],
)
def test_a_message_that_is_wrong(message: str, problem: str) -> None:
    assert any(problem in line for line in problems(message))


def test_comments_of_git_are_not_part_of_the_message() -> None:
    added = "# Please enter the message\n# ------------------------ >8 ------------------------\n" + "diff " * 40
    assert problems("targets: replay it" + BODY + added) == []


def test_the_hook_prints_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("targets: replay it\n")
    assert main(str(file)) == 1
    assert capsys.readouterr().err.startswith("commit message: a body says why")
    file.write_text("targets: replay it" + BODY)
    assert main(str(file)) == 0
