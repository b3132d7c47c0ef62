"""Run every publisher with the newest target, and every target with the newest publisher.

    make matrix                                  all pairs; writes the tables in docs/versions.md
    python -m tests.matrix 14:18 18:15           some of them, publisher:target
    python -m tests.matrix --variant binary …    with these options only

Each pair is tried with every set of options that the publisher understands (scenario.py). Options that CREATE
SUBSCRIPTION refuses show as refused, everything else that goes wrong as failed.
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

from subscriber.errors import StatementError, SubscriberError
from subscriber.ops.servers import Server, temporary_servers
from tests.documents import write_section
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
PAIRS = [(publisher, NEWEST) for publisher in (*sorted(PACKED), NEWEST)] + [
    (NEWEST, target) for target in sorted(PACKED) if target >= OLDEST_TARGET
]


@dataclass
class Pair:
    publisher: str  # versions as the servers tell them
    target: str
    results: dict[str, str] = field(default_factory=dict)  # variant -> ok, –, refused: …, failed
    said: dict[str, str] = field(default_factory=dict)  # about a lost slot, a dropped publication
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return "failed" in (*self.results.values(), *self.said.values())


async def run_pair(publisher_major: int, target_major: int, variants: list[Variant]) -> Pair:
    """Start the two servers and try everything."""
    began = monotonic()
    async with temporary_servers() as servers:
        publisher = await servers.create("publisher", SETTINGS, bin=programs(publisher_major))
        target = await servers.create("target", SETTINGS, bin=programs(target_major))
        await publisher.start()
        await target.start()
        found = Pair(await _version(publisher), await _version(target))
        directory = servers.directory
        for variant in variants:
            if variant.since > publisher_major:
                found.results[variant.name] = "–"
                continue
            steps = partial(subscribe_and_compare, publisher, target, variant, directory / variant.name)
            found.results[variant.name] = await _outcome(steps, f"{found.publisher} to {found.target}, {variant.name}")
        if target_major == NEWEST:
            found.said = await _said(publisher, target, directory, found.publisher)
        found.seconds = monotonic() - began
    return found


async def _said(publisher: Server, target: Server, directory: Path, version: str) -> dict[str, str]:
    """What this publisher says about a slot that is lost, and about a publication that is not there."""
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
    return done.stdout.decode().split()[2]


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
    parser.add_argument("pairs", nargs="*", metavar="PUBLISHER:TARGET", help="majors; all pairs without any")
    parser.add_argument("--variant", action="append", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--write", action="store_true", help="write the tables in docs/versions.md")
    options = parser.parse_args()
    wanted = [tuple(map(int, pair.split(":"))) for pair in options.pairs] or PAIRS
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
