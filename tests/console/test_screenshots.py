"""Pictures of the console for its page of the documentation: copies, streams, a conflict, a lost slot, 10,000 tables.

With SCREENSHOTS=1 the pictures replace those of docs/images. Chromium's own console must have no error in any scene.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from subscriber.cli.http import serve_targets
from subscriber.demo.servers import Servers
from tests.cli.test_http import FREE, SERVED, Client, served
from tests.console.browser import CHROMIUM, MISSING, Browser, running_browser
from tests.console.test_actions import TOKEN, TOKENS
from tests.console.test_browser import BUTTON, BUTTONS, PAGE_LIMIT, PAINT
from tests.plugins.fix_cluster import SETTINGS, Database, fresh_database
from tests.plugins.fix_proxy import Proxies
from tests.plugins.fix_subscriber import Subscriber, Subscriptions, running_subscriber
from tests.processes import opened

pytestmark = [pytest.mark.soak, pytest.mark.skipif(CHROMIUM is None, reason=MISSING), pytest.mark.timeout(500)]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDE, PHONE = (1240, 800), (390, 800)
TABLES = 200
INSERT = "INSERT INTO orders (customer, total) VALUES (random() * 1000, random() * 100);"
POINTS = "(document.querySelector('.spark .line')?.getAttribute('d').match(/L/g) ?? []).length"


@asynccontextmanager
async def page(client: Client, folder: Path, path: str = "") -> AsyncIterator[Browser]:
    """Open the page in a browser. Its console must have no errors at the end."""
    async with running_browser(folder / "browser") as browser:
        await browser.size(*WIDE)
        await browser.open(f"http://127.0.0.1:{client.port}/{path}")
        await browser.wait_for("document.querySelector('main .card')")
        yield browser
        assert browser.errors == []


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Return the folder that pictures are saved in."""
    folder = IMAGES if os.environ.get("SCREENSHOTS") else tmp_path / "images"
    folder.mkdir(exist_ok=True)
    return folder


async def write(source: Database, script: Path) -> None:
    """Commit 500 transactions a second to the shop's orders, until cancelled."""
    script.write_text(INSERT)
    options = ["--no-vacuum", "--client=2", "--rate=500", "--time=400", f"--file={script}", "--username=postgres"]
    where = ["--host=127.0.0.1", f"--port={source.server.port}", source.name]
    async with opened([str(source.server.bin / "pgbench"), *options, *where]) as process:
        await process.wait()


ORDERS = "CREATE TABLE orders (id bigserial PRIMARY KEY, customer int, total numeric)"
PRICES = "CREATE TABLE prices (item int PRIMARY KEY, price numeric NOT NULL)"


async def test_the_console_shows_streaming_copying_and_a_conflict(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path, pictures: Path
) -> None:
    catalog = [f"CREATE TABLE catalog.item_{number:03} (id int PRIMARY KEY, v text)" for number in range(TABLES)]
    await target_db.execute(ORDERS, PRICES, "CREATE SCHEMA catalog", *catalog)
    fill = "INSERT INTO catalog.item_{:03} SELECT g, repeat('x', 200) FROM generate_series(1, 4000) g"
    filled = [fill.format(number) for number in range(TABLES)]
    await source_db.execute(ORDERS, PRICES, "CREATE SCHEMA catalog", *catalog, *filled)
    await source_db.execute(
        "CREATE PUBLICATION orders_pub FOR TABLE orders",
        "CREATE PUBLICATION prices_pub FOR TABLE prices",
        "CREATE PUBLICATION catalog_pub FOR TABLES IN SCHEMA catalog",
        "CREATE TABLE customers (id int PRIMARY KEY)",
        "ALTER PUBLICATION orders_pub ADD TABLE customers",
    )
    await target_db.execute("CREATE TABLE customers (id int PRIMARY KEY)")
    await subscriber.create(source_db, "orders_pub", "orders", slot_name="orders")
    await subscriber.create(source_db, "prices_pub", "prices", slot_name="prices")
    await subscriber.wait_for_ready(source_db, "orders")
    await subscriber.wait_for_ready(source_db, "prices")
    async with (
        served(subscriber, target_db.dsn(), FREE) as client,
        page(client, tmp_path) as browser,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(write, source_db, tmp_path / "orders.sql")
        await browser.wait_for(f"{POINTS} >= 12")
        await target_db.execute("INSERT INTO prices VALUES (4711, 10)")
        await source_db.execute("INSERT INTO prices VALUES (4711, 12)")
        await source_db.execute("CREATE TABLE vouchers (id int PRIMARY KEY)")
        await source_db.execute("ALTER PUBLICATION orders_pub ADD TABLE vouchers")
        await subscriber.create(source_db, "catalog_pub", "catalog", slot_name="catalog")
        await browser.wait_for("document.querySelector('.tone-wrong .problem') && document.querySelector('.copy')")
        await browser.wait_for("/about .* left/.test(document.body.innerText)")
        await browser.screenshot(pictures / "console-overview.png")
        await browser.size(*WIDE, dark=True)
        await browser.screenshot(pictures / "console-overview-dark.png")
        await browser.size(*PHONE, scale=2)
        await browser.screenshot(pictures / "console-phone.png")
        await browser.size(*WIDE)
        await browser.open(f"http://127.0.0.1:{client.port}/#/catalog")
        await browser.wait_for("document.querySelector('#tables .state-waiting') && document.querySelector('.copy')")
        await browser.screenshot(pictures / "console-copy.png")
        await browser.open(f"http://127.0.0.1:{client.port}/#/prices")
        await browser.wait_for("document.querySelector('#conflicts table')")
        assert "SKIP (lsn = " in await browser.text()
        assert "4711" not in await browser.value("document.querySelector('#conflicts').innerText")
        await browser.screenshot(pictures / "console-conflict.png")
        await browser.open(f"http://127.0.0.1:{client.port}/#/orders")
        await browser.wait_for("document.querySelector('#chart-transactions .line')?.getAttribute('d').length > 60")
        await browser.screenshot(pictures / "console-streaming.png")
        tasks.cancel_scope.cancel()


async def test_the_console_shows_a_lost_slot(
    servers: Servers, target_db: Database, subscriber: Subscriber, tmp_path: Path, pictures: Path
) -> None:
    settings = {**SETTINGS, "max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    server = await servers.create("small", settings)
    await server.start()
    async with fresh_database(server) as source:
        for database in (source, target_db):
            await database.execute(ORDERS)
        await source.execute("CREATE PUBLICATION p FOR TABLE orders")
        await subscriber.create(source, "p", "orders", slot_name="orders")
        await subscriber.wait_for_ready(source, "orders")
        await subscriber.execute("ALTER SUBSCRIPTION orders DISABLE")
        await source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'orders'", False)
        for _ in range(3):
            await source.execute("SELECT pg_logical_emit_message(false, 'test', 'x')", "SELECT pg_switch_wal()")
        await source.execute("CHECKPOINT")
        await subscriber.execute("ALTER SUBSCRIPTION orders ENABLE")
        await subscriber.wait_for_state("stopped", "orders")
        async with served(subscriber, target_db.dsn(), FREE) as client, page(client, tmp_path, "#/orders") as browser:
            await browser.wait_for_text("stopped: needs you")
            await browser.wait_for_text("lost")
            assert "the target does not answer" not in await browser.text()
            command = "document.querySelector('#problems .command').textContent"
            assert await browser.value(command) == "subscriber reseed orders"
            await browser.screenshot(pictures / "console-lost-slot.png")


async def test_the_console_shows_a_target_that_stops(
    target_db: Database, proxies: Proxies, tmp_path: Path, pictures: Path
) -> None:
    proxy = await proxies.to(target_db.server.port)
    async with (
        running_subscriber(target_db) as subscriber,
        served(subscriber, proxy.dsn(target_db.dsn()), FREE) as client,
        running_browser(tmp_path / "browser") as browser,
    ):
        await browser.size(*WIDE)
        await browser.open(f"http://127.0.0.1:{client.port}/")
        await browser.wait_for_text("This database has none")
        await proxy.cut()
        await browser.wait_for_text("The target does not answer")
        await browser.screenshot(pictures / "console-stopped-target.png")
        await proxy.restore()
        await browser.wait_for_text("This database has none")
        assert browser.errors == []


async def test_the_console_shows_ten_thousand_tables(
    target_db: Database, subscriber: Subscriber, tmp_path: Path, pictures: Path
) -> None:
    await subscriber.create("host=127.0.0.1 port=1", "p", "s", connect=False, slot_name="s")
    await target_db.execute(
        "CREATE SCHEMA big",
        *[
            f"DO $$ BEGIN FOR n IN {start}..{start + 499} LOOP"
            " EXECUTE format('CREATE TABLE big.t%s (id int)', lpad(n::text, 5, '0')); END LOOP; END $$"
            for start in range(0, 10_000, 500)
        ],
        "INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srnspname, srrelname)"
        " SELECT s.subid, c.oid, CASE WHEN c.relname < 't07000' THEN 'r' ELSE 'i' END, 'big', c.relname"
        " FROM pg_class c, subscriber.subscription s WHERE c.relnamespace = 'big'::regnamespace AND c.relkind = 'r'",
    )
    async with served(subscriber, target_db.dsn(), FREE) as client, page(client, tmp_path, "#/s") as browser:
        await browser.wait_for_text("1–50 of 10,000 tables")
        first_paint = await browser.value(PAINT)
        await browser.screenshot(pictures / "console-tables.png", whole=False)
        await browser.value(
            "{ const box = document.getElementById('search'); box.focus(); box.value = '099';"
            " box.dispatchEvent(new Event('input', { bubbles: true })); }"
        )
        await browser.wait_for("/of 1\\d\\d tables/.test(document.body.innerText)")
        assert await browser.value("document.activeElement.id") == "search"
        assert await browser.value("document.querySelectorAll('#tables tbody tr').length") == 50
        files = [number for number, url in browser.requests.items() if "/events" not in url and ".json" not in url]
        size = sum(browser.bytes.get(number, 0) for number in files)
    print(f"first paint {first_paint:.0f} ms, page {size} bytes")
    assert 10_000 < size < PAGE_LIMIT


async def test_a_comparison_by_a_person(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path, pictures: Path
) -> None:
    for database in (source_db, target_db):
        await database.execute(ORDERS)
    await source_db.execute("INSERT INTO orders (customer, total) SELECT g, g FROM generate_series(1, 5000) g")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE orders")
    await subscriber.create(source_db, "p", "orders", slot_name="orders")
    await subscriber.wait_for_ready(source_db, "orders")
    await target_db.execute("DELETE FROM orders WHERE id = 42")
    async with (
        served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client,
        running_browser(tmp_path / "browser") as browser,
    ):
        await browser.size(*WIDE)
        await browser.open(f"http://127.0.0.1:{client.port}/#/orders")
        await browser.wait_for(f"{BUTTONS}.includes('Sign in to act')")
        await browser.value(f"{BUTTON}('Sign in to act').click()")
        await browser.call("Input.insertText", text=TOKEN)
        await browser.press("Enter", 13)
        for label in ("Verify", "Repair"):
            await browser.wait_for(f"{BUTTONS}.includes('{label}') && !{BUTTON}('{label}').disabled")
            await browser.value(f"{BUTTON}('{label}').click()")
            await browser.value("document.querySelector('#dialog .primary').click()")
            result = {"Verify": "1 of 1 table differs", "Repair": "1 row of 1 table repaired"}[label]
            await browser.wait_for_text(result)
        await browser.screenshot(pictures / "console-actions.png")
        assert browser.errors == []


async def test_the_console_shows_several_targets(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path, pictures: Path
) -> None:
    for target, name in ((source_db, "shop"), (target_db, "billing")):
        await Subscriptions(target).create("host=127.0.0.1 port=1", "p", name, connect=False, slot_name="s")
    targets = [source_db.dsn(), "host=127.0.0.1 port=1 dbname=archive user=u", target_db.dsn()]
    subscriber.log.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_targets, FREE, targets)
        client = Client(int((await subscriber.log.wait_for(SERVED))[1]))
        async with page(client, tmp_path) as browser:
            await browser.wait_for_text("The target does not answer")
            await browser.wait_for_text("billing")
            await browser.screenshot(pictures / "console-targets.png")
            await browser.value("document.querySelectorAll('a[href*=billing]')[0].click()")
            await browser.wait_for("document.querySelector('h1')?.textContent === 'billing'")
        tasks.cancel_scope.cancel()
