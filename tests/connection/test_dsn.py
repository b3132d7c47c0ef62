"""Connection strings in the forms that programs have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import PostgresDsn, SecretStr
from sqlalchemy import make_url

import subscriber
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.errors import ConninfoError

PARTS = {"user": "me", "password": "p@s/s :w%rd", "host": "here", "port": "5433", "dbname": "shop"}
ENCODED = "postgresql+asyncpg://me:p%40s%2Fs%20%3Aw%25rd@here:5433/shop"


@pytest.mark.parametrize(
    "dsn",
    [
        ENCODED,
        ENCODED.replace("+asyncpg", ""),
        ENCODED.replace("%20", " "),
        make_url(ENCODED),
        make_url(ENCODED).render_as_string(hide_password=False),
        PostgresDsn(ENCODED),
        SecretStr(ENCODED),
        lambda: SecretStr(ENCODED),
        lambda: make_url(ENCODED),
        r"host=here port=5433 user=me dbname=shop password='p@s/s :w%rd'",
    ],
    ids=range(10),
)
async def test_all_forms_are_the_same(dsn: Dsn) -> None:
    conninfo = await resolve_dsn(dsn)
    assert dict((await conninfo.renewed()).parameters) == dict(conninfo.parameters) == PARTS
    assert "w%rd" not in repr(conninfo)


async def test_the_parameters_of_drivers() -> None:
    for url in (
        "postgresql+asyncpg:///shop?host=a:1&host=b:2&ssl=require&prepared_statement_cache_size=0&application_name=me",
        make_url("postgresql+asyncpg:///shop?host=a:1&host=b:2&ssl=require&statement_cache_size=0&application_name=me"),
    ):
        assert dict((await resolve_dsn(url)).parameters) == {
            "host": "a,b", "port": "1,2", "sslmode": "require", "application_name": "me", "dbname": "shop",
        }  # fmt: skip
    with pytest.raises(ConninfoError, match='invalid URI query parameter: "colour"'):
        await resolve_dsn(make_url("postgresql+psycopg://me@here/shop?colour=red"))
    with pytest.raises(ConninfoError, match=r'database "mysql\+asyncmy" is not supported'):
        await resolve_dsn(make_url("mysql+asyncmy://me:hunter2@here/shop"))


async def test_the_text_of_a_url_that_hides_its_password_is_refused() -> None:
    url = make_url("postgresql+asyncpg://me:hunter2@here/shop")
    with pytest.raises(ConninfoError, match="which SQLAlchemy shows in place of it") as raised:
        await resolve_dsn(str(url))
    assert raised.value.hint == "Pass the URL itself, such as engine.url, and not its text."


async def test_a_function_is_called_for_each_connection() -> None:
    numbers = iter(range(10))

    async def token() -> str:
        return f"host=here password={next(numbers)}"

    conninfo = await resolve_dsn(token)
    assert [(await conninfo.renewed()).get("password") for _ in range(2)] == ["1", "2"]
    assert conninfo.with_(dbname="shop").renew is None


async def test_files_and_variables_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dsn"
    file.write_text("host=a password=one\n")
    file.chmod(0o644)
    with pytest.raises(ConninfoError, match="has group or world access"):
        await resolve_dsn(f"@{file}")
    file.chmod(0o600)
    conninfo = await resolve_dsn(f"@{file}")
    file.write_text("host=a password=two\n")
    assert (conninfo.get("password"), (await conninfo.renewed()).get("password")) == ("one", "two")
    monkeypatch.setenv("SHOP_DSN", "host=b")
    assert (await resolve_dsn("$SHOP_DSN")).get("host") == "b"
    with pytest.raises(ConninfoError, match='environment variable "NO_DSN" is not set') as raised:
        await resolve_dsn("$NO_DSN")
    assert raised.value.hint == "export NO_DSN='postgresql://user@host/database'"


def test_a_subscription_cannot_name_a_file() -> None:
    with pytest.raises(ConninfoError):
        Conninfo.parse("@/etc/passwd")


@pytest.mark.parametrize("wrong", [5, None, b"host=here", SimpleNamespace(password="hunter2"), lambda: 5])
async def test_other_objects_are_refused_without_their_text(wrong: Dsn) -> None:
    with pytest.raises(TypeError) as raised:
        await resolve_dsn(wrong)
    assert "hunter2" not in str(raised.value)


def test_trio_is_refused_with_one_sentence() -> None:
    entering = subscriber.connect("host=nowhere.invalid").__aenter__()  # without asyncio's event loop
    with pytest.raises(RuntimeError, match="needs asyncio: trio is not supported"):
        entering.send(None)
