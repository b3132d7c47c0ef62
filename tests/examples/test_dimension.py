"""examples/dimension.py keeps all versions of the rows of a table."""

from __future__ import annotations

import runpy
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.plugins.fix_cluster import Database

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "dimension.py"


def bring_up_to_date(source: Database, directory: Path) -> None:
    example = [sys.executable, str(EXAMPLE), source.dsn(), "p", str(directory), "public.customers", "id"]
    subprocess.run(example, check=True, timeout=200, capture_output=True)


@pytest.mark.soak
@pytest.mark.timeout(500)
async def test_the_dimension_has_the_versions_of_each_time(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(
        "CREATE TABLE customers (id int PRIMARY KEY, city text)",
        "CREATE PUBLICATION p FOR TABLE customers",
        "INSERT INTO customers VALUES (1, 'Ulm'), (2, 'Brno')",
    )
    bring_up_to_date(source_db, tmp_path)
    between = datetime.now(UTC)
    await source_db.execute("UPDATE customers SET city = 'Graz' WHERE id = 1", "DELETE FROM customers WHERE id = 2")
    bring_up_to_date(source_db, tmp_path)
    valid_at = runpy.run_path(str(EXAMPLE))["valid_at"]
    assert {(row["id"], row["city"]) for row in valid_at(tmp_path, between)} == {(1, "Ulm"), (2, "Brno")}
    assert {(row["id"], row["city"]) for row in valid_at(tmp_path, datetime.now(UTC))} == {(1, "Graz")}


def test_the_example_names_its_missing_arguments() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], timeout=60, capture_output=True, text=True, check=False)
    assert "the following arguments are required: source, publication, directory, table, key" in done.stderr
