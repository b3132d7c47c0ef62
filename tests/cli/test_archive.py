"""`subscriber archive --info` lists all damage, and exits 1 if there is any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from subscriber.changelog.consumers import read_consumers, register
from subscriber.changelog.reader import ChangeLog
from subscriber.cli.main import app
from subscriber.errors import ChangeLogError, StatementError
from tests.changelog.test_damage import Sample, flipped


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path / "log")


def info(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["archive", "--info", "--directory", str(directory), *options])


def damage(path: Path) -> None:
    """Flip a bit in the body of a block."""
    path.write_bytes(flipped(path.read_bytes(), 8 * 100))


@pytest.mark.parametrize("command", ["archive --source x --publication p --directory d", "lake advance d --log l"])
def test_an_invalid_position_is_refused(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--until", "foo"])
    assert '--until must be an LSN such as 16/B374D848, not "foo"' in str(result.exception)


def test_the_report_of_an_undamaged_log_has_no_damage(sample: Sample) -> None:
    result = info(sample.directory)
    assert result.exit_code == 0
    assert str(sample.position) in result.stdout
    assert result.stderr == ""
    result = info(sample.directory, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["damage"] == []


def test_each_damaged_segment_is_named(sample: Sample) -> None:
    """The contents of the log are printed nevertheless."""
    damaged = [sample.sealed[1], sample.open]
    for path in damaged:
        damage(path)
    result = info(sample.directory)
    assert result.exit_code == 1
    assert str(sample.position) in result.stdout
    assert result.stderr.count("ERROR:") == 2
    result = info(sample.directory, "--json")
    assert result.exit_code == 1
    for path, error in zip(damaged, json.loads(result.stdout)["damage"], strict=True):
        assert str(path) in error["message"]
        assert "after" in error["detail"]
        assert "copy" in error["hint"]


def test_consumers_are_listed_and_forgotten(sample: Sample) -> None:
    position = ChangeLog(sample.directory).start()
    register(sample.directory, "nightly", "stream of pgcdc", position)
    output = info(sample.directory).stdout
    assert f"consumer nightly (stream of pgcdc): at {position} since" in output
    (consumer,) = json.loads(info(sample.directory, "--json").stdout)["consumers"]
    sealed = sum(path.stat().st_size for path in sample.sealed)
    assert (consumer["name"], consumer["lsn"], consumer["bytes"]) == ("nightly", str(position), sealed)

    def forget(name: str) -> Result:
        return CliRunner().invoke(app, ["archive", "--directory", str(sample.directory), "--forget", name])

    assert forget("nightly").stdout == "forgot consumer nightly\n"
    assert isinstance(forget("nightly").exception, StatementError)
    assert read_consumers(sample.directory) == []


@pytest.mark.parametrize("name", ["sealed", "log.json"])
def test_a_log_that_cannot_be_listed(sample: Sample, name: str) -> None:
    if name == "sealed":
        sample.sealed[1].unlink()
    else:
        sample.path(name).write_text("{}")
    result = info(sample.directory)
    assert result.exit_code == 1
    assert "ERROR:" in result.stderr
    result = info(sample.directory, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["damage"]) == 1


def test_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    result = info(tmp_path)
    assert isinstance(result.exception, ChangeLogError)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["--source", "host=h"], "--publication,"),
        (["--publication", "p"], "--source,"),
        ([], "--source and --publication,"),
    ],
)
def test_options_that_are_missing_are_named(tmp_path: Path, given: list[str], missing: str) -> None:
    result = CliRunner().invoke(
        app, ["archive", "--directory", str(tmp_path), *given], env={"SUBSCRIBER_SOURCE_DSN": ""}
    )
    assert result.exit_code == 2
    assert f"give {missing} or --info" in " ".join(result.stderr.replace("│", " ").split())
