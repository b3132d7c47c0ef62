"""The configuration file: `--target NAME`, and `subscriber config`."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber.cli.config import read_config, unresolved
from subscriber.errors import ConninfoError
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database

SECRET = f"{MARK} of the file"


def written(folder: Path, text: str, mode: int = 0o644) -> Path:
    file = folder / "subscriber.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def subscriber(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "subscriber", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


async def test_a_command_takes_its_target_and_the_role_that_applies_from_the_file(
    target_db: Database, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(stat.S_IRUSR)
    dsn = target_db.server.dsn(target_db.name)
    file = written(
        tmp_path,
        f'[targets.shop]\ndsn = "{dsn}"\npassword = "$SHOP"\n'
        f'apply_dsn = "{dsn}"\napply_password = "@{tmp_path}/secret"\n'
        '[targets.other]\ndsn = "host=192.0.2.1 user=nobody"\npassword = "$NOT_SET"\n',
    )
    for done in (
        subscriber("--config", str(file), "status", "--target", "shop", SHOP=SECRET),
        subscriber("status", SUBSCRIBER_TARGET_DSN="shop", SUBSCRIBER_CONFIG=str(file), SHOP=SECRET),
    ):
        assert (done.returncode, done.stdout) == (0, "no subscriptions\n"), done.stderr
    missing = subscriber("--config", str(file), "status", "--target", "shop")
    assert missing.returncode == 3
    assert missing.stderr == ('ERROR:  environment variable "SHOP" is not set\nHINT:  read -rs SHOP && export SHOP\n')
    near = subscriber("--config", str(file), "status", "--target", "shopp")
    assert near.returncode == 3
    assert near.stderr == (
        f'ERROR:  target "shopp" is not in configuration file "{file}"\nHINT:  Perhaps you meant "shop".\n'
    )


def test_a_file_that_does_not_exist_is_an_error_for_any_target(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.toml"
    for target in ("shop", "host=192.0.2.1"):
        done = subscriber("--config", str(file), "status", "--target", target)
        assert (done.returncode, done.stderr) == (
            3,
            f'ERROR:  could not open configuration file "{file}": No such file or directory\n',
        )


def test_a_name_without_a_file_names_the_variable() -> None:
    done = subscriber("status", "--target", "shop")
    assert done.returncode == 3
    assert done.stderr == (
        'ERROR:  missing "=" after "shop" in connection info string\n'
        "HINT:  For a target of a configuration file, name the file: export SUBSCRIBER_CONFIG=subscriber.toml\n"
    )


def test_the_keys_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP", SECRET)
    text = '[targets.shop]\ndsn = "postgresql://app@h/shop"\npassword = "$SHOP"\napply_dsn = "host=h user=writer"\n'
    target = read_config(written(tmp_path, text)).target("shop")
    assert target.connection() == f"user=app host=h dbname=shop password='{SECRET}'"
    assert target.apply_connection() == "host=h user=writer"


def test_show_hides_passwords_and_not_where_they_are(tmp_path: Path) -> None:
    text = (
        f'[targets.shop]\ndsn = "postgresql://app:{SECRET.replace(" ", "%20")}@h/shop"\n'
        f'apply_dsn = "host=h user=writer"\napply_password = "{SECRET}"\n'
        '[targets."of Zoë"]\ndsn = "$ZOE_DSN"\npassword = "@/run/secrets/zoe"\n'
    )
    file = written(tmp_path, text, 0o600)
    shown = subscriber("--config", str(file), "config", "show")
    assert shown.stdout == (
        '[targets.shop]\ndsn = "postgresql://app:********@h/shop"\n'
        'apply_dsn = "host=h user=writer"\napply_password = "********"\n\n'
        '[targets."of Zoë"]\ndsn = "$ZOE_DSN"\npassword = "@/run/secrets/zoe"\n'
    ), shown.stderr
    as_json = json.loads(subscriber("--config", str(file), "config", "show", "--json").stdout)
    assert as_json["targets"]["shop"]["apply_password"] == "********"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("tagets = 1", 'unknown key "tagets"', 'Perhaps you meant "targets".'),
        ("targets = 1", "a target is a table", 'Write [targets.NAME], then dsn = "…".'),
        (
            '[targets.shop]\ndsn = "host=h"\npasword = "$SHOP"',
            'unknown key "pasword" in [targets.shop]',
            'Perhaps you meant "password".',
        ),
        ("[targets.shop]\ndsn = 1", '"dsn" in [targets.shop] is not a text', None),
        (
            '[targets.shop]\npassword = "$SHOP"',
            '"dsn" is missing in [targets.shop]',
            'Such as: dsn = "postgresql://user@host/database"',
        ),
    ],
)
def test_a_problem_is_found_and_the_file_is_not_used(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    file = written(tmp_path, text)
    config = read_config(file)
    assert (config.problems[0].message, hint and str(config.problems[0].hint)) == (
        f'configuration file "{file}": {message}',
        hint,
    )
    with pytest.raises(ConninfoError):
        config.target("shop")


@pytest.mark.parametrize(
    ("keys", "has_password"),
    [
        (f"dsn = \"host=h password='{SECRET}'\"", True),
        (f'dsn = "postgresql://u:{SECRET}@h/d"', True),
        (f'dsn = "host=h"\npassword = "{SECRET}"', True),
        ('dsn = "host=h"\npassword = "$NAME"', False),
        ('dsn = "@FILE"\napply_dsn = "$NAME"\napply_password = "@FILE"', False),
    ],
)
def test_only_a_file_without_a_password_may_be_read_by_others(tmp_path: Path, keys: str, has_password: bool) -> None:
    file = written(tmp_path, f"[targets.shop]\n{keys}\n")
    problems = read_config(file).problems
    assert [str(problem.hint) for problem in problems] == ([f"chmod 600 {file}"] if has_password else [])
    file.chmod(0o600)
    assert not read_config(file).problems


def test_check_finds_everything_at_once_and_connects_nowhere(tmp_path: Path) -> None:
    text = (
        f'[targets.shop]\ndsn = "host=h password={SECRET.split(maxsplit=1)[0]}"\n[targets.b]\ndsn = "host"\n'
        '[targets.c]\ndsn = "host=h"\npassword = "$NOT_SET"\napply_dsn = "@nowhere"\nuser = "c"\n'
    )
    file = written(tmp_path, text)
    done = subscriber("--config", str(file), "config", "check")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert errors == [
        f'ERROR:  configuration file "{file}": unknown key "user" in [targets.c]',
        f'ERROR:  configuration file "{file}" has a password, and group or world access',
        'ERROR:  missing "=" after "host" in connection info string',
        'ERROR:  environment variable "NOT_SET" is not set',
        'ERROR:  could not open connection string file "nowhere": No such file or directory',
    ]
    assert f'CONTEXT:  target "c" of configuration file "{file}"' in done.stderr
    written(tmp_path, '[targets.shop]\ndsn = "host=h"\n')
    done = subscriber("--config", str(file), "config", "check")
    assert (done.returncode, done.stdout) == (0, f"{file}: 1 targets, no problems\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConninfoError, match="could not open configuration file"):
        read_config(tmp_path / "missing.toml")
    with pytest.raises(ConninfoError, match="is not TOML"):
        read_config(written(tmp_path, "targets"))
    done = subscriber("config", "show")
    assert done.returncode == 2
    assert "SUBSCRIBER_CONFIG" in done.stderr


def test_an_unused_target_need_not_be_complete(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, '[targets.a]\ndsn = "host=h"\n[targets.b]\ndsn = "$NOT_SET"\n'))
    assert config.target("a").connection() == "host=h"
    assert [error.message for error in unresolved(config)] == ['environment variable "NOT_SET" is not set']
