"""The Spark session of this package: the caller's own, or one that is started here and cleaned up.

    with spark_session() as spark:                         all processors of this machine
    with spark_session(master="spark://host:7077") as …    a cluster
    with spark_session(session) as spark:                  the caller's, which is not changed

**Purpose.** A session that is started here prints nothing (errors are raised, not logged), finds a Java runtime
(java_runtime.py), keeps its files in a temporary directory, and ends with its processes at the end of the block. Failed
tasks are retried, on one machine as well. On executors, our code needs asyncpg, anyio and this package. If executors
are not processes of this machine, the package is sent to them, and only the libraries have to be installed.

**Failure cases.** Driver's Python process killed: the JVM, which reads from it, ends, and its Python workers with it.
The next process that starts a session removes the directory (work_directory.py).
"""

from __future__ import annotations

import atexit
import re
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from subscriber.errors import ConnectionLost, SubscriberError
from subscriber.spark.class_archive import spark_directory
from subscriber.spark.environment import environment_variables
from subscriber.spark.error_text import readable_error
from subscriber.spark.java_runtime import java_home
from subscriber.spark.tasks import is_connect, spark_errors
from subscriber.spark.work_directory import create_work_directory, remove_work_directory
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAEMON = "subscriber.spark.python_daemon"  # of Spark's Python workers
MASTER = "local[*,4]"  # all processors, four attempts for a task; plain local[*] has one attempt
MEMORY = "1g"  # of the JVM; rows are in the Python workers and in PostgreSQL

# For work that the JVM only distributes: it starts faster, and compiling more would not make it faster.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_LOG4J = """
rootLogger.level = fatal
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = fatal
logger.repl.name = org.apache.spark.repl.Main
logger.repl.level = fatal
"""

# Settings of every session; the caller's `conf` overrides them.
_CONF = {
    "spark.app.name": "subscriber",
    "spark.driver.memory": MEMORY,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Without these two, small batches to Python workers and each checkpoint wait for tens of milliseconds.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
CONNECT_PORT = 15002  # of Spark Connect, where the address has none
CONNECT_TIMEOUT = 10.0  # seconds
_MASTER = re.compile(
    r"local(\[\s*([0-9]+|\*)\s*(,\s*[0-9]+\s*)?\])?|local-cluster\[\s*[0-9]+\s*,\s*[0-9]+\s*,\s*[0-9]+\s*\]"
    r"|yarn|[a-z][a-z0-9+-]*://.*",
    re.DOTALL,
)
_STACK = "-Xss4m"  # stopping a query inside foreachBatch overflows the default stack


@contextmanager
def spark_session(
    session: SparkSession | None = None,
    *,
    master: str = MASTER,
    conf: Mapping[str, str] = MappingProxyType({}),
    java_options: str = "",
) -> Iterator[SparkSession]:
    """Open a Spark session that can run our code, for the duration of the block.

    Args:
        session: a session to use as it is; None: a new one.
        master: Spark's master (local[4], local-cluster[2,1,1024], spark://…, yarn, k8s://…), or the address of a server
            of Spark Connect (sc://…), which has a driver and settings of its own.
        conf: additional settings.
        java_options: options of the driver's JVM.

    Raises:
        SubscriberError: the master has no form that Spark knows, pyspark or Java is missing, or this process already
            has a session that was not passed. Also in place of an exception of Spark that leaves the block of a new
            session: the error of this package that is its cause, or its class and place.
    """
    if session is not None:
        ship(session)
        yield session
        return
    check_master(master)
    _check_pyspark()
    with ExitStack() as stack:
        directory = create_work_directory()
        stack.callback(remove_work_directory, directory)
        opened = _connect(master) if is_remote(master) else _open(master, conf, java_options, directory)
        stack.callback(_close, opened)
        ship(opened, directory)
        with _readable_errors():
            yield opened


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Replace exceptions whose text is in the JVM, which ends before Python prints it."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors.exceptions.captured import CapturedException

    try:
        yield
    except (Py4JJavaError, CapturedException) as error:
        raise readable_error(error).with_traceback(_frames_of_block(error.__traceback__)) from None


def _frames_of_block(first: TracebackType | None) -> TracebackType | None:
    """Cut the frames of Spark's libraries off, so that the line which failed is next to the error."""
    frame = first
    while frame is not None and frame.tb_next is not None:
        name: str = frame.tb_next.tb_frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in ("pyspark", "py4j"):
            frame.tb_next = None
        frame = frame.tb_next
    return first


def check_master(master: str) -> None:
    """Raise SubscriberError if Spark has no master of this form. Spark itself would print the traceback of its JVM."""
    if _MASTER.fullmatch(master) is None:
        if master.startswith("sc:"):
            raise _wrong_address()
        raise SubscriberError(
            f'"{master}" is not a master of Spark',
            hint="Write it like local[4], spark://host:7077, k8s://https://host:6443, yarn, or sc://host:15002.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )


def _check_pyspark() -> None:
    if spark_directory() is None:
        raise SubscriberError(
            "pyspark is not installed",
            hint="Install it with: pip install 'pgsubscriber[spark]'",
            sqlstate=UNDEFINED_FILE,
        )
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        raise SubscriberError(
            "this process has a Spark session already",
            hint="Pass it as an argument: a process can have only one session.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _open(master: str, conf: Mapping[str, str], java_options: str, directory: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    log4j = directory / "log4j2.properties"
    log4j.write_text(_LOG4J)
    settings = {
        **_CONF,
        "spark.master": master,
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": f"{_STACK} -Dlog4j2.configurationFile=file:{log4j} {java_options}".rstrip(),
    }
    environment = {"JAVA_HOME": str(java_home(directory, installed_pyspark=_is_one_process(master)))}
    if is_local(master):
        # Use the interpreter of this process, not the first python3 of PATH, and a fixed address of this machine.
        environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings["spark.python.daemon.module"] = DAEMON
        environment["SPARK_HOME"] = str(_spark_home(master, directory / "home"))
    builder: Any = SparkSession.builder
    for name, value in {**settings, **conf}.items():
        builder = builder.config(name, value)
    with environment_variables(environment):
        try:
            opened: SparkSession = builder.getOrCreate()
        except BaseException:
            _end_jvm()
            raise
    return opened


def _connect(master: str) -> SparkSession:
    """Open a session on a server of Spark Connect. Errors do not show the address, which may have a token."""
    from pyspark.errors import PySparkValueError
    from pyspark.sql import SparkSession

    if find_spec("grpc") is None:
        raise SubscriberError(
            "Spark Connect needs the module grpc",
            hint="Install it with: pip install 'pyspark[connect]'",
            sqlstate=UNDEFINED_FILE,
        )
    try:
        host, port = urlsplit(master).hostname, urlsplit(master).port or CONNECT_PORT
    except ValueError:
        raise _wrong_address() from None
    try:  # pyspark would try again for ten minutes, without a word
        socket.create_connection((host or "", port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConnectionLost(
            f"could not connect to Spark Connect at {host}:{port}", detail=f"{error.strerror or error}."
        ) from error
    try:
        opened: SparkSession = SparkSession.builder.remote(master).create()
    except PySparkValueError:
        raise _wrong_address() from None
    with spark_errors():
        opened.conf.set("spark.sql.session.timeZone", "UTC")
    return opened


def _wrong_address() -> SubscriberError:
    return SubscriberError(
        "the address of Spark Connect cannot be used",
        hint=f"Write it like sc://host:{CONNECT_PORT}/;use_ssl=true.",
        sqlstate=INVALID_PARAMETER_VALUE,
    )


def is_remote(master: str) -> bool:
    """Return True if `master` is the address of a server of Spark Connect."""
    return master.startswith("sc://")


def is_local(master: str) -> bool:
    """Return True if all processes of the session are on this machine: local[…] and local-cluster[…]."""
    return master.startswith("local")


def _is_one_process(master: str) -> bool:
    """Return True if the executors are threads of the driver, and the Python workers children of it."""
    return master.startswith("local") and not master.startswith("local-cluster")


def _spark_home(master: str, home: Path) -> Path:
    """Return pyspark's directory; for local-cluster, whose executors write into it, one with links to its files."""
    package = spark_directory()
    assert package is not None
    if _is_one_process(master):
        return package
    home.mkdir()
    for part in ("bin", "jars", "python", "sbin", "data", "licenses"):
        if (package / part).exists():
            (home / part).symlink_to(package / part)
    return home


def _close(session: SparkSession) -> None:
    try:
        session.stop()
    finally:
        _end_jvm()


def _end_jvm() -> None:
    """End the JVM. pyspark would keep it until this process ends, and has no public function for it."""
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway, context._gateway, context._jvm = context._gateway, None, None
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


# --- code for executors ---------------------------------------------------------------------------


_shipped: set[str] = set()  # applications and sessions that have the package


def ship(session: SparkSession, directory: Path | None = None) -> None:
    """Send this package to the session's executors, unless they are forks of this Python process.

    Args:
        directory: the directory from which it is served during the session; None: a directory of this process.
    """
    if is_connect(session):
        _send(session, directory)
        return
    context = session.sparkContext
    if (context.master or "").startswith("local[") or context.applicationId in _shipped:
        return
    if directory is None:
        directory = create_work_directory()
        atexit.register(remove_work_directory, directory)
    context.addPyFile(str(package_zip(directory)))
    assert context.applicationId is not None
    _shipped.add(context.applicationId)


def _send(session: SparkSession, directory: Path | None) -> None:
    """Send this package to the server of a Spark Connect session, which passes it on to its executors."""
    number: str = session.session_id  # type: ignore[attr-defined]
    if number in _shipped:
        return
    with tempfile.TemporaryDirectory(prefix="subscriber-", dir=directory) as folder:
        session.addArtifacts(str(package_zip(Path(folder))), pyfile=True)
    _shipped.add(number)


def package_zip(directory: Path) -> Path:
    """Create an archive of this package from which Python can import."""
    package = Path(__file__).resolve().parent.parent
    archive = directory / "subscriber.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for file in sorted([*package.rglob("*.py"), package / "__init__.pyi"]):
            out.write(file, file.relative_to(package.parent))
    return archive
