"""The archive of Spark's classes: whose it has to be, what the JVM does with it, and how it is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber.errors import SubscriberError
from subscriber.spark import class_archive_builder
from subscriber.spark.class_archive import (
    VARIABLE,
    ClassArchive,
    archive_directory,
    class_archive,
    replaceable_by_others,
    spark_directory,
)
from subscriber.spark.class_archive_builder import KEPT, create_class_archive
from subscriber.spark.java_runtime import find_java, java_home

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, f"{tmp_path}/classes")
    return tmp_path / "classes"


def archive() -> ClassArchive:
    archive_file = class_archive(find_java())
    assert archive_file is not None
    return archive_file


def test_the_directory_of_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/not/used")
    assert archive_directory() == Path("/home/ada/.cache/subscriber/spark")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert archive_directory() == tmp_path / "subscriber" / "spark"
    monkeypatch.setenv(VARIABLE, "/var/lib/spark")
    assert archive_directory() == Path("/var/lib/spark")
    for without in ("", "relative"):
        monkeypatch.setenv(VARIABLE, without)
        assert archive_directory() is None
        assert class_archive(find_java()) is None


def test_an_archive_belongs_to_one_runtime_and_one_installation(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "java"
    other.mkdir()
    files = {archive().file}
    for version in ("17.0.1", "17.0.2"):
        (other / "release").write_text(f'JAVA_VERSION="{version}"\n')
        archive_file = class_archive(other)
        assert archive_file is not None
        files.add(archive_file.file)
    assert len(files) == 3
    assert {file.parent for file in files} == {directory}
    assert class_archive(tmp_path / "nowhere") is None


def test_a_file_that_others_can_replace_is_not_used(directory: Path) -> None:
    archive_file = archive()
    assert not archive_file.is_usable()
    directory.mkdir(mode=0o700)
    archive_file.file.write_bytes(b"code")
    assert archive_file.is_usable()
    for place in (archive_file.file, directory, directory.parent):
        mode = place.stat().st_mode
        for others in (0o020, 0o002):
            place.chmod(mode | others)
            assert replaceable_by_others(archive_file.file) == place
            assert not archive_file.is_usable()
        place.chmod(mode)
    directory.chmod(0o1777)  # like /tmp
    assert archive_file.is_usable()


@as_root
def test_the_file_of_another_user_is_not_used(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    archive_file = archive()
    archive_file.file.write_bytes(b"code")
    for place in (archive_file.file, directory):
        os.chown(place, NOBODY, NOBODY)
        assert not archive_file.is_usable()
        os.chown(place, 0, 0)
    assert archive_file.is_usable()


def test_a_link_is_as_safe_as_where_it_leads(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "file").write_bytes(b"code")
    archive_file = archive()
    archive_file.file.symlink_to(tmp_path / "open" / "file")
    assert not archive_file.is_usable()


def small_list(classes: Path) -> None:
    """In place of a session of Spark: a few classes of the runtime, and one of Spark's."""
    classes.write_text("java/lang/Object\njava/lang/String\norg/apache/spark/deploy/SparkSubmit\n")


@pytest.fixture(scope="module")
def made_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive, made by the real Java."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("made") / "classes"))
        patch.setattr(class_archive_builder, "_list_classes", small_list)
        return create_class_archive()


@pytest.fixture
def small(made_archive: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the archive, and its directory."""
    monkeypatch.setattr(class_archive_builder, "_list_classes", small_list)
    shutil.copytree(made_archive.parent, directory)
    return directory / made_archive.name


def test_spark_starts_with_the_archive(small: Path, tmp_path: Path) -> None:
    """As pyspark starts it. The option is for the JVM that gets the archive, which ends if it cannot use it."""
    home = spark_directory()
    environment = os.environ | {"SPARK_HOME": str(home), "JAVA_HOME": str(java_home(tmp_path))}
    environment["SPARK_SUBMIT_OPTS"] = "-Xshare:on"
    command = [f"{home}/bin/spark-submit", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "version 4." in done.stderr


def test_java_starts_without_an_archive_that_is_wrong(small: Path, tmp_path: Path) -> None:
    """It says nothing of it."""
    jars = f"{spark_directory()}/jars"
    slf4j = next(Path(jars).glob("slf4j-api-*.jar"))
    command = [f"{java_home(tmp_path)}/bin/java", "-cp", f"{spark_directory()}/conf:{slf4j}:{jars}/*", "-version"]
    strict = [*command[:-1], "-Xshare:on", "-version"]
    before = subprocess.check_output(strict, stderr=subprocess.STDOUT, text=True)
    assert "sharing" in before
    half = small.read_bytes()[: small.stat().st_size // 2]
    for wrong in (b"", b"not an archive" * 1000, half):
        small.unlink()
        small.write_bytes(wrong)
        after = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
        assert after.replace(", sharing", "") == before.replace(", sharing", "")
        assert subprocess.run(strict, capture_output=True, check=False).returncode != 0


def test_the_class_path_of_another_program_is_left_alone(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o700)
    archive().file.touch()
    script = (java_home(tmp_path) / "bin" / "java").read_text()
    assert str(archive().file) in script
    program = tmp_path / "script"
    program.write_text(script.replace(f'exec "{find_java()}/bin/java"', "printf '%s\\n'"))
    jars = f"{spark_directory()}/jars"
    for given in (["-cp", f"{jars}/*", "org.apache.spark.launcher.Main"], ["-cp", f"/x:{jars}/*", "a b"], ["*"]):
        assert subprocess.check_output(["sh", program, *given], text=True).splitlines() == given


def test_the_archive_is_made_once_and_again_when_damaged(small: Path, directory: Path) -> None:
    """It is made once, again if it is damaged, and only the newest files stay."""
    made = small.stat()
    assert made.st_mode & 0o022 == 0
    assert directory.stat().st_mode & 0o777 == 0o700
    assert create_class_archive() == small
    assert small.stat().st_ino == made.st_ino
    for age in range(KEPT + 1):
        old = directory / f"{age}.jsa"
        old.touch()
        os.utime(old, (1000 - age, 1000 - age))
    (directory / "killed.unfinished").touch()
    small.chmod(0o600)
    os.truncate(small, 100_000)
    assert create_class_archive() == small
    assert small.stat().st_size == made.st_size
    assert {file.name for file in directory.iterdir()} == {small.name, "0.jsa", "1.jsa", "lock"}


def test_an_archive_that_cannot_be_made_has_its_reason(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive_builder, "_list_classes", lambda classes: classes.write_text("\0"))
    directory.mkdir()
    directory.chmod(0o770)
    with pytest.raises(SubscriberError, match="are not stored") as raised:
        create_class_archive()
    assert str(directory) in str(raised.value.detail)
    directory.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(broken_java(directory.parent / "java")))
    with pytest.raises(SubscriberError, match="cannot store Spark's classes") as raised:
        create_class_archive()
    assert raised.value.detail == "No space left on device"
    assert [file.name for file in directory.iterdir()] == ["lock"]
    monkeypatch.setenv(VARIABLE, "/dev/null/classes")
    with pytest.raises(SubscriberError, match="Not a directory"):
        create_class_archive()
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(SubscriberError, match="cannot be stored"):
        create_class_archive()


def broken_java(home: Path) -> Path:
    """A Java whose disk is full: it leaves a part of the file."""
    (home / "bin").mkdir(parents=True)
    shutil.copy(find_java() / "release", home)
    program = home / "bin" / "java"
    program.write_text(
        "#!/bin/sh\n"
        'for a do case $a in -XX:SharedArchiveFile=*) echo part > "${a#*=}" ;; esac; done\n'
        "echo No space left on device; exit 1\n"
    )
    program.chmod(0o755)
    return home


USE = """
from pathlib import Path
from pyspark import SparkContext
from subscriber.spark.session import spark_session
with spark_session(master="local[1]"):
    print(".jsa" in Path(f"/proc/{SparkContext._gateway.proc.pid}/maps").read_text())
"""


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(600)  # makes the whole archive
def test_two_commands_at_once_make_one_archive_that_a_session_uses(directory: Path) -> None:
    command = [sys.executable, "-m", "subscriber", "prepare-spark"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in "12"]
    said = [process.communicate(timeout=500)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0] == said[1]
    assert said[0].startswith(f"Spark's classes are stored in {archive().file} (")
    assert subprocess.check_output([sys.executable, "-c", USE], text=True) == "True\n"
    assert {file.name for file in directory.iterdir()} == {archive().file.name, "lock"}
