"""The tools of the version matrix. `make matrix` runs the matrix itself."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from tests.documents import write_section
from tests.matrix.__main__ import PAIRS, Pair, said, table
from tests.matrix.debian import SUITES, debian
from tests.matrix.programs import NotAvailable, check, programs


def test_programs_that_are_not_those_of_the_checksum_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.tgz"
    archive.write_bytes(b"as it was")
    checksum = base64.b64encode(hashlib.sha512(b"as it was").digest()).decode()
    check(archive, checksum)
    archive.write_bytes(b"as it is")
    with pytest.raises(NotAvailable, match=r"a\.tgz is not what it was"):
        check(archive, checksum)
    with pytest.raises(NotAvailable, match="nothing is known of version 9"):
        programs(9)
    with pytest.raises(NotAvailable, match="no suite of Debian has PostgreSQL 9"):
        debian(9)


def test_every_publisher_and_every_target_has_a_pair() -> None:
    assert {publisher for publisher, _ in PAIRS} >= {"14", "15", "16", "17", "18"}
    assert {target for _, target in PAIRS} >= {"14", "15", "16", "17", "18"}
    debians = {f"debian{major}" for major in SUITES}
    assert {publisher for publisher, _ in PAIRS} >= debians
    assert {target for _, target in PAIRS} >= debians - {"debian13"}  # no target is that old
    assert len(set(PAIRS)) == len(PAIRS)


def test_only_the_section_is_written(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("before\n<!-- pairs -->\nold\n<!-- end of pairs -->\nafter\n")
    pairs = [Pair("14.1", "18.1", {"default": "ok", "binary": "failed"}, {"lost slot": "gone"})]
    write_section(document, "pairs", f"{table(pairs)}\n{said(pairs)}")
    lines = document.read_text().splitlines()
    assert (lines[:2], lines[-2:]) == (["before", "<!-- pairs -->"], ["<!-- end of pairs -->", "after"])
    assert any(line.startswith("| 14.1 | 18.1 | ok | failed |") for line in lines)
    assert "| 14.1 | gone |  |" in lines
    assert pairs[0].failed
    with pytest.raises(ValueError, match="0 sections called other"):
        write_section(document, "other", "")
