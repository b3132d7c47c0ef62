"""Count constructions that make a reader search for the noun, in docstrings, comments and Markdown.

    python -m tools.prose [PATH]...     each occurrence with its place, and the rates of each folder

Plain technical English names its subject, has one fact in a sentence, and uses PostgreSQL's and Python's terms.
tests/architecture/test_prose.py keeps each room below a limit. The count is a meter, not the aim: a sentence that
avoids a word and is no clearer is no progress.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS_PER_SENTENCE = 25

# The name of a construction, and where it occurs. CONTRIBUTING.md says what to write instead.
CONSTRUCTIONS = {
    "a clause as a noun": r"\bwhat (?:is|are|was|were|has|have|had|there|it|they|we|you|can|could|may|must)\b"
    r"|\bwhat (?:will|would)\b"
    r"|\bwhat (?:stands|waits|one|follows|happens|belongs|needs)\b",
    "nobody in particular": r"\b(?:some|any|no)(?:body|one)\b(?! of)|\b(?:who|what|which)ever\b",
    "a preposition and a pronoun": r"\bof (?:it|them|these|those|which)\b|\b(?:there|where)(?:of|by|upon|from)\b",
    "come": r"\b(?:come|comes|came|coming)\b",
    "look": r"\blook(?:s|ed|ing)?\b(?!-)",
    "tell": r"\b(?:tell|tells|told)\b",
    "go on": r"\b(?:go|goes|went|going|gone) on\b",
    "an old adverb": r"\b(?:anew|besides|likewise|meanwhile|hereby|for ever|at once|as good as|in good order)\b",
    "a paraphrase of a term": r"\b(?:mend(?:s|ed|ing)?|try(?:ing)? again|tries again|pass(?:es|ed)? over"
    r"|hand(?:s|ed)? out|let go|got over|one by one|under way|in the way)\b",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CONSTRUCTIONS.items()}
_CODE = re.compile(r"``.+?``|`[^`\n]+`|https?://\S+")
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*?$", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?:;](?=\s|$)|\n[ \t]*\n|\n[ \t]*(?:[-*|#>]|\d+\.|\w+:)|[|·]|(?<=\S) {2,}(?=\S)")
_WORD = re.compile(r"[A-Za-z][\w'-]*")


@dataclass(frozen=True)
class Passage:
    """A docstring, a comment of one or several lines, or a Markdown file without its code."""

    line: int
    text: str


@dataclass
class Tally:
    """Counts of some files."""

    words: int = 0
    found: Counter[str] = field(default_factory=Counter)
    long_sentences: int = 0

    def add(self, other: Tally) -> None:
        self.words += other.words
        self.found.update(other.found)
        self.long_sentences += other.long_sentences

    @property
    def rate(self) -> float:
        """Constructions per 1,000 words."""
        return 1000 * self.found.total() / max(self.words, 1)

    @property
    def rate_of_long_sentences(self) -> float:
        """Sentences of more than WORDS_PER_SENTENCE words, per 1,000 words."""
        return 1000 * self.long_sentences / max(self.words, 1)


def passages(file: Path) -> Iterator[Passage]:
    """Yield the prose of a Python or Markdown file. Code in backquotes and in blocks is blanked."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield Passage(1, _without_code(_FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)))
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield Passage(node.lineno, _without_code(docstring))
    yield from _comments(text)


def _comments(text: str) -> Iterator[Passage]:
    """Yield comments. Those on consecutive lines of their own are one passage."""
    start, lines, previous = 0, list[str](), -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            alone = not token.line[: token.start[1]].strip()
            if lines and not (alone and line == previous + 1):
                yield Passage(start, _without_code("\n".join(lines)))
                lines = []
            start = start if lines else line
            lines.append(token.string.lstrip("#! "))
            previous = line if alone else -1
    if lines:
        yield Passage(start, _without_code("\n".join(lines)))


def _without_code(text: str) -> str:
    return _CODE.sub("code", text)


def occurrences(passage: Passage) -> Iterator[tuple[int, str, str]]:
    """Yield (line, construction, the words) for each one in a passage."""
    for name, pattern in _PATTERNS.items():
        for match in pattern.finditer(passage.text):
            yield passage.line + passage.text.count("\n", 0, match.start()), name, " ".join(match[0].split())


def long_sentences(passage: Passage) -> Iterator[str]:
    """Yield the sentences of more than WORDS_PER_SENTENCE words. A list item or a table cell is one of its own."""
    for sentence in _SENTENCE_END.split(passage.text):
        if len(_WORD.findall(sentence)) > WORDS_PER_SENTENCE:
            yield " ".join(sentence.split())


def measure(files: Iterable[Path]) -> Tally:
    """Count words, constructions and long sentences of all files."""
    total = Tally()
    for file in files:
        for passage in passages(file):
            total.words += len(_WORD.findall(passage.text))
            total.found.update(name for _, name, _ in occurrences(passage))
            total.long_sentences += sum(1 for _ in long_sentences(passage))
    return total


def files_of(path: Path) -> list[Path]:
    """Return `path` itself if it is a file, else its Python and Markdown files."""
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


def main(arguments: list[str]) -> None:
    """Print each occurrence and long sentence, then the rates of each folder."""
    for file in [file for path in map(Path, arguments or ["subscriber", "docs"]) for file in files_of(path)]:
        for passage in passages(file):
            for line, name, words in occurrences(passage):
                print(f"{file}:{line}: {name}: {words}")
            for sentence in long_sentences(passage):
                print(f"{file}:{passage.line}: long sentence: {sentence}")
    for path in map(Path, arguments or ["subscriber", "docs"]):
        tally = measure(files_of(path))
        rates = f"{tally.rate:.1f} constructions and {tally.rate_of_long_sentences:.1f} long sentences"
        print(f"{path}: {rates} in 1,000 of {tally.words:,} words")


if __name__ == "__main__":
    main(sys.argv[1:])
