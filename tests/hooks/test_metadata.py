"""Hooks from SQLAlchemy's MetaData."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text

from subscriber import Hook, HookError, hooks_from


def test_a_table_of_sqlalchemy_names_its_source() -> None:
    metadata = MetaData()
    Table("own", metadata, Column("id", Integer))
    Table(
        "people",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("full_name", Text, info={"source": "name"}),
        Column("email", Text, info={"mask": None}),
        Column("seen", Integer, info={"source": None}),
        schema="staging",
        info={"source": "person"},
    )
    hooks = hooks_from(metadata)
    assert hooks.tables == {
        ("public", "person"): Hook(
            to=("staging", "people"), rename={"name": "full_name"}, keep=["id", "name", "email"], mask={"email": None}
        )
    }
    assert hooks.target("public", "own") == ("public", "own")


def test_two_tables_with_one_source_are_refused() -> None:
    metadata = MetaData()
    for name in ("a", "b"):
        Table(name, metadata, Column("id", Integer), info={"source": "public.t"})
    with pytest.raises(HookError, match=r'source "public\.t"'):
        hooks_from(metadata)
