"""The programs in the documentation run, and use only names that exist."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

import subscriber
from subscriber import Kind, testing
from subscriber.change_stream import rows, stream, transaction
from tests.plugins.fix_cluster import Database

ROOT = Path(__file__).parent.parent.parent
STREAM = ROOT / "docs" / "stream.md"


def programs(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


async def test_the_consumer_of_the_readme_runs(source_db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = [program for program in programs(ROOT / "README.md") if "subscriber.stream(" in program]
    head, _, _ = text.partition("asyncio.run(")
    assert len([line for line in head.splitlines() if line.strip()]) <= 10
    names: dict[str, Any] = {}
    exec(head, names)
    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY, name text)", "CREATE PUBLICATION shop_pub FOR TABLE t")
    with anyio.move_on_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(names["follow"], source_db.dsn())
            streaming = "application_name = 'mine' AND state = 'streaming'"
            await source_db.wait_for(f"SELECT count(*) FROM pg_stat_replication WHERE {streaming}", 1)
            await source_db.execute("TRUNCATE t", "INSERT INTO t VALUES (1, 'Ulm')", "DELETE FROM t")
            printed = ""
            while "delete" not in printed:
                await asyncio.sleep(0.02)
                printed += capsys.readouterr().out
            tasks.cancel_scope.cancel()
    assert "insert public.t {'id': 1} {'id': 1, 'name': 'Ulm'}" in printed
    assert "delete public.t {'id': 1} None" in printed


@pytest.mark.parametrize("number", range(len(programs(STREAM))))
def test_programs_about_the_stream_name_what_there_is(number: int) -> None:
    tree = ast.parse(
        "async def program():\n" + "".join(f"    {line}\n" for line in programs(STREAM)[number].splitlines())
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"subscriber": subscriber, "publisher": testing.FakePublisher, "stream": stream.Stream}.get(
                node.value.id
            )
            assert owner is None or node.attr in dir(owner) or node.attr == "position" or node.attr == "confirmed"


def test_the_page_names_every_kind_callback_and_option() -> None:
    text = STREAM.read_text()
    for kind in Kind:
        assert f"`{kind.name}`" in text
    for name in dir(subscriber.Consumer):
        assert name.startswith("_") or f"`{name}`" in text
    for name in (*dir(rows.Row), *dir(transaction.Transaction)):
        public = not name.startswith("_") and name not in dir(dict) and name not in UNSAID
        assert not public or re.search(rf"\b{name}\b", text), name


# Names that a program does not need: internals of Transaction, and names for which a docstring is enough.
UNSAID = {
    *(
        "number",
        "held_number",
        "handed_out",
        "over",
        "pass_over",
        "set_time",
        "finish_lsn",
        "first",
        "subxid",
        "xid",
        "time",
    ),
    *("changes", "texts", "is_binary", "relation", "complete", "leave"),
}
