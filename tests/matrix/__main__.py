"""Run every publisher with the newest targets, and every target with the newest publishers.

    make matrix                                  all pairs; writes the tables in docs/versions.md
    python -m tests.matrix 14:18 18:debian15     some of them, publisher:target
    python -m tests.matrix --variant binary …    only with these options

A number is a packaged server (programs.py), debian15 is Debian's package (debian.py): with JIT, an ICU collation as the
default of databases, and messages in German.

Each pair is run with every set of options that the publisher supports (scenario.py). Options that CREATE SUBSCRIPTION
refuses are shown as refused, all other errors as failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import anyio

from subscriber.demo.servers import Server, Servers, temporary_servers
from subscriber.errors import StatementError, SubscriberError
from tests.documents import write_section
from tests.matrix.debian import LOCALE, SUITES, debian, has_locale
from tests.matrix.programs import NEWEST, PACKED, NotAvailable, programs
from tests.matrix.scenario import (
    PATIENCE,
    SETTINGS,
    VARIANTS,
    Failed,
    Variant,
    dropped_publication,
    lost_slot,
    subscribe_and_compare,
)

Question = Callable[[Server, Server, Path], Awaitable[str]]

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs/versions.md"
OLDEST_TARGET = 14
DEBIAN = "debian"
SLOWEST = f"{DEBIAN}15"  # the newest target of Debian's on which a plan without an index costs enough for JIT
LATEST = f"{DEBIAN}{max(SUITES)}"  # newer than all packaged servers
PAIRS = (
    [(f"{publisher}", f"{NEWEST}") for publisher in (*sorted(PACKED), NEWEST)]
    + [(f"{NEWEST}", f"{target}") for target in sorted(PACKED) if target >= OLDEST_TARGET]
    + [(f"{DEBIAN}{publisher}", SLOWEST) for publisher in sorted(SUITES)]
    + [(f"{DEBIAN}{NEWEST}", f"{DEBIAN}{target}") for target in sorted(SUITES) if target > 15]
    + [(f"{publisher}", LATEST) for publisher in (*sorted(PACKED), NEWEST)]
    + [(LATEST, f"{target}") for target in (*sorted(PACKED), NEWEST) if target >= OLDEST_TARGET]
    + [(LATEST, LATEST)]
)


@dataclass
class Pair:
    publisher: str  # versions as reported by the servers
    target: str
    results: dict[str, str] = field(default_factory=dict)  # variant -> ok, –, refused: …, failed
    said: dict[str, str] = field(default_factory=dict)  # about a lost slot, a dropped publication
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return "failed" in (*self.results.values(), *self.said.values())


async def run_pair(publisher_build: str, target_build: str, variants: list[Variant]) -> Pair:
    """Start the two servers and try everything."""
    began = monotonic()
    async with temporary_servers() as servers:
        publisher = await _create(servers, "publisher", publisher_build)
        target = await _create(servers, "target", target_build)
        await publisher.start()
        await target.start()
        pair = Pair(await _version(publisher), await _version(target))
        directory = servers.directory
        for variant in variants:
            if variant.since > _major(publisher_build):
                pair.results[variant.name] = "–"
                continue
            steps = partial(subscribe_and_compare, publisher, target, variant, directory / variant.name)
            pair.results[variant.name] = await _outcome(steps, f"{pair.publisher} to {pair.target}, {variant.name}")
        if target_build == f"{NEWEST}":
            pair.said = await _said(publisher, target, directory, pair.publisher)
        pair.seconds = monotonic() - began
    return pair


def _major(build: str) -> int:
    return int(build.removeprefix(DEBIAN))


async def _create(servers: Servers, name: str, build: str) -> Server:
    """Create a server of that build. Raises NotAvailable."""
    major = _major(build)
    if not build.startswith(DEBIAN):
        return await servers.create(name, SETTINGS, bin=programs(major))
    bin = debian(major)
    german = {"lc_messages": LOCALE} if has_locale(bin) else {}
    icu = ("--locale-provider=icu", "--icu-locale=de") if major >= 15 else ()
    return await servers.create(name, SETTINGS | german, bin=bin, initdb=icu)


async def _said(publisher: Server, target: Server, directory: Path, version: str) -> dict[str, str]:
    """Return this publisher's messages about a lost slot, and about a missing publication."""
    said = {}
    for name, question in (("lost slot", lost_slot), ("dropped publication", dropped_publication)):

        async def ask(question: Question = question, name: str = name) -> None:
            said[name] = await question(publisher, target, directory / name.replace(" ", "_"))

        if (outcome := await _outcome(ask, f"{version}, {name}")) != "ok":
            said[name] = outcome
    return said


async def _outcome(steps: Callable[[], Awaitable[None]], what: str) -> str:
    try:
        with anyio.fail_after(PATIENCE):
            await steps()
    except StatementError as error:
        return f"refused: {error.message}"
    except (Failed, SubscriberError, TimeoutError) as error:
        print(f"--- {what}: failed\n{error!r}\n{error}", file=sys.stderr, flush=True)
        return "failed"
    return "ok"


async def _version(server: Server) -> str:
    done = await anyio.run_process([str(server.bin / "postgres"), "--version"])
    said = done.stdout.decode()
    return said.split()[2] + (" (Debian)" if "(Debian" in said else "")


def table(pairs: list[Pair]) -> str:
    names = [variant.name for variant in VARIANTS]
    lines = [f"| publisher | target | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for pair in pairs:
        cells = " | ".join(pair.results.get(name, "") for name in names)
        lines.append(f"| {pair.publisher} | {pair.target} | {cells} |")
    return "\n".join(lines)


def said(pairs: list[Pair]) -> str:
    lines = ["| publisher | lost slot | dropped publication |", "|---|---|---|"]
    for pair in pairs:
        if pair.said:
            cells = " | ".join(pair.said.get(name, "") for name in ("lost slot", "dropped publication"))
            lines.append(f"| {pair.publisher} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="PUBLISHER:TARGET", help="builds; all pairs without any")
    parser.add_argument("--variant", action="append", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--write", action="store_true", help="write the tables in docs/versions.md")
    options = parser.parse_args()
    wanted = [tuple(pair.split(":")) for pair in options.pairs] or PAIRS
    variants = [variant for variant in VARIANTS if options.variant is None or variant.name in options.variant]
    done: list[Pair] = []
    for publisher, target in wanted:
        try:
            pair = anyio.run(run_pair, publisher, target, variants)
        except NotAvailable as reason:
            print(f"{publisher} to {target}: not tried, {reason}", flush=True)
            continue
        done.append(pair)
        results = "  ".join(f"{name} {result}" for name, result in pair.results.items())
        print(f"{pair.publisher} to {pair.target}: {results}  ({pair.seconds:.0f} s)", flush=True)
    if options.write:
        write_section(DOCUMENT, "pairs", table(done))
        write_section(DOCUMENT, "messages", said(done))
    return int(any(pair.failed for pair in done) or not done)


if __name__ == "__main__":
    sys.exit(main())
