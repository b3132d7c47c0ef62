"""Check the message of a commit: the area first, imperative, at most 72 characters, and a body that says why.

    python -m tools.commit_message FILE

The commit-msg hook of pre-commit runs it. Merges, reverts and commits to be squashed are exempt.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT_LENGTH = 72
BODY_LENGTH = 100
BODY_WORDS = 5

_EXEMPT = re.compile(r"(?:Merge |Revert |fixup! |squash! |amend! )")
_AREA = r"[\w.-]+(?:[/ ][\w.-]+)?"
_SUBJECT = re.compile(rf"{_AREA}(?:, {_AREA})*: (?P<verb>\S+)(?: .*)?")
# "adds", "added", "adding"; not "pass", "need", "bring".
_INFLECTED = re.compile(r"\w+(?:[^s]s|ed|ing)", re.IGNORECASE)
_IMPERATIVE = {"bring", "embed", "exceed", "feed", "need", "ping", "proceed", "seed", "speed", "string", "succeed"}


def problems(message: str) -> list[str]:
    """Return what is wrong with a commit message, one line each.

    Args:
        message: the text that git passes to the hook, with its comments.
    """
    lines = [line.rstrip() for line in message.partition("\n# ------------------------ >8")[0].splitlines()]
    lines = [line for line in lines if not line.startswith("#")]
    subject, rest = (lines or [""])[0], lines[1:]
    if _EXEMPT.match(subject):
        return []
    found = []
    if not (match := _SUBJECT.fullmatch(subject)):
        found.append('the subject needs an area first, as in "targets: replay a rejected batch row by row"')
    elif match["verb"][0].isupper():
        found.append("the subject continues in lower case after the area")
    elif _INFLECTED.fullmatch(match["verb"]) and match["verb"] not in _IMPERATIVE:
        found.append(f'the subject is imperative: not "{match["verb"]}"')
    if len(subject) > SUBJECT_LENGTH:
        found.append(f"the subject has {len(subject)} characters, more than {SUBJECT_LENGTH}")
    if subject.endswith("."):
        found.append("the subject ends without a full stop")
    if rest and rest[0]:
        found.append("the second line is empty")
    if len(" ".join(rest).split()) < BODY_WORDS:
        found.append("a body says why: what was wrong, what was rejected, how it was measured")
    if any(len(line) > BODY_LENGTH and " " in line.strip() for line in rest):
        found.append(f"lines of the body have at most {BODY_LENGTH} characters")
    return found


def main(path: str) -> int:
    """Print the problems of the message in `path`. Returns the exit status."""
    found = problems(Path(path).read_text(encoding="utf-8"))
    for line in found:
        print(f"commit message: {line}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
