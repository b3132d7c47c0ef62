"""A Hive metastore from the jars of PySpark, with a database of Derby in a temporary directory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from subscriber.demo.object_store import free_ports
from subscriber.demo.servers import watched_directory
from subscriber.spark.java_runtime import find_java

TIMEOUT = 120.0  # seconds for the server to start

# Hive's scripts create the tables of locks. These are not in the jars, and the metastore creates only its other tables.
LOCK_TABLES = """
CONNECT 'jdbc:derby:{database};create=true';
CREATE TABLE NEXT_LOCK_ID (NL_NEXT BIGINT NOT NULL);
INSERT INTO NEXT_LOCK_ID VALUES (1);
CREATE TABLE AUX_TABLE (
    MT_KEY1 VARCHAR(128) NOT NULL, MT_KEY2 BIGINT NOT NULL, MT_COMMENT VARCHAR(255), PRIMARY KEY (MT_KEY1, MT_KEY2)
);
CREATE TABLE HIVE_LOCKS (
    HL_LOCK_EXT_ID BIGINT NOT NULL, HL_LOCK_INT_ID BIGINT NOT NULL, PRIMARY KEY (HL_LOCK_EXT_ID, HL_LOCK_INT_ID),
    HL_TXNID BIGINT, HL_DB VARCHAR(128) NOT NULL, HL_TABLE VARCHAR(128), HL_PARTITION VARCHAR(767),
    HL_LOCK_STATE CHAR(1) NOT NULL, HL_LOCK_TYPE CHAR(1) NOT NULL, HL_LAST_HEARTBEAT BIGINT NOT NULL,
    HL_ACQUIRED_AT BIGINT, HL_USER VARCHAR(128) NOT NULL, HL_HOST VARCHAR(128) NOT NULL, HL_HEARTBEAT_COUNT INTEGER,
    HL_AGENT_INFO VARCHAR(128), HL_BLOCKEDBY_EXT_ID BIGINT, HL_BLOCKEDBY_INT_ID BIGINT
);
"""


@contextmanager
def hive_metastore() -> Iterator[str]:
    """Run a metastore. Yields its URI."""
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    jars = f"{Path(spark.origin).parent}/jars/*"
    (port,) = free_ports(1)
    with watched_directory() as directory:
        database = directory / "database"
        settings = {
            "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={database};create=true",
            "datanucleus.schema.autoCreateAll": "true",
            "datanucleus.connectionPoolingType": "none",  # that of the default is not among the jars
            "hive.metastore.schema.verification": "false",
            "hive.metastore.warehouse.dir": f"{directory}/warehouse",
            "hive.async.log.enabled": "false",  # as the pool of connections
        }
        properties = [
            f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
        ]
        (directory / "hive-site.xml").write_text(f"<configuration>{''.join(properties)}</configuration>")
        script, log = directory / "locks.sql", directory / "log"
        script.write_text(LOCK_TABLES.format(database=database))
        java = [f"{find_java()}/bin/java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        java += [f"-Dhive.log.dir={directory}", "-cp", f"{directory}:{jars}"]
        with log.open("wb") as output:
            subprocess.run([*java, "org.apache.derby.tools.ij", script], check=True, stdout=output, cwd=directory)
            process = subprocess.Popen(
                [*java, "org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(port)],
                stdout=output,
                stderr=output,
                cwd=directory,
                start_new_session=True,
            )
        (directory / "metastore.pid").write_text(f"{process.pid}\n")
        try:
            until = time.monotonic() + TIMEOUT
            while not _answers(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield f"thrift://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
