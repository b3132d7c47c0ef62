"""The alert rules and the dashboard of examples/monitoring, with a real promtool and a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from subscriber.status.metrics import GENERAL, METRICS
from tests.cli.test_http import FREE, prepare, served
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.processes import opened

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
MISSING = "Prometheus is not installed (Debian: apt-get install prometheus)"
CONFIGURATION = """
global: {{scrape_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - {{job_name: subscriber, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}
"""
# Panels that are empty for a healthy subscription of a publisher without limits.
EMPTY = {"Time until the slot is lost", "Problems", "Conflicts"}
LIMIT = "subscriber_slot_max_bytes"


def queries() -> list[tuple[str, str]]:
    """Return the title of a panel and the expression, for each of the dashboard."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    known = {*GENERAL, *(metric.name for metric in METRICS)}
    text = (FOLDER / "alerts.yml").read_text() + " ".join(expression for _, expression in queries())
    assert set(re.findall(r"\bsubscriber_\w+", text)) <= known


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
def test_the_rules_alert() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run([str(PROMTOOL), *command], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.skipif(PROMETHEUS is None, reason=MISSING)
async def test_a_real_prometheus_evaluates_the_rules(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path
) -> None:
    await prepare(source_db, target_db)
    await subscriber.create(source_db, "p")
    await subscriber.wait_for_ready(source_db)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def get(path: str, query: str) -> Any:
        parameters = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"http://{address}{path}?{parameters}", timeout=20) as answer:
            return json.load(answer)["data"]

    async def ask(path: str, query: str = "") -> Any:
        return await anyio.to_thread.run_sync(get, path, query)

    async with served(subscriber, target_db.dsn(), FREE) as client:
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(CONFIGURATION.format(rules=FOLDER / "alerts.yml", port=client.port))
        options = [
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path}",
            f"--web.listen-address={address}",
        ]
        async with opened([str(PROMETHEUS), *options], cwd=tmp_path, stdout=None, stderr=None) as process:
            samples: list[Any] = []
            with anyio.fail_after(60):
                while not samples:  # a rate needs two scrapes
                    with suppress(OSError):
                        samples = (await ask("/api/v1/query", "rate(subscriber_transactions_total[1m])"))["result"]
                    await anyio.sleep(0.2)
            for title, expression in queries():
                answer = await ask("/api/v1/query", expression.replace("$subscription", ".*"))
                assert bool(answer["result"]) == (title not in EMPTY and LIMIT not in expression), (title, expression)
            rules = (await ask("/api/v1/rules"))["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
            process.terminate()
