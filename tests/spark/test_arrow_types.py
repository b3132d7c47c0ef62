"""Arrays that readers share, and the objects that Spark's workers do not collect."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pyarrow as pa
import pytest

from subscriber.errors import ValueUnsupported
from subscriber.spark.sources.arrow_types import arrow_array, multiples
from subscriber.spark.tasks import spare_collector, sparing_collector


@pytest.mark.parametrize("number", [0, 1, 2, 7, 8, 9, 1000])
def test_multiples_of_a_step_are_computed(number: int) -> None:
    for step in (1, 26):
        assert multiples(step, number).to_pylist() == [step * place for place in range(number)]


def test_multiples_beyond_int32_are_refused() -> None:
    assert multiples(1 << 20, 2048)[-1].as_py() == 2047 << 20
    with pytest.raises(OverflowError):
        multiples(1 << 20, 2050)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.date32(), "date"),
        (pa.timestamp("us", tz="UTC"), "timestamptz"),
        (pa.decimal128(10, 2), "numeric(10,2)"),
        (pa.int32(), "integer"),
    ],
)
def test_a_value_that_does_not_fit_names_postgresql_s_type(kind: pa.DataType, name: str) -> None:
    with pytest.raises(ValueUnsupported) as raised:
        arrow_array([b"infinity"], kind, "public.t.a")
    assert raised.value.message == f'a value of column "public.t.a" cannot be stored as {name}'


def test_objects_are_excluded_from_collection_once_for_each_import(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        spare_collector()
        before = gc.get_freeze_count()
        kept = [[number] for number in range(1000)]
        assert list(sparing_collector(iter(kept))) == kept
        assert gc.get_freeze_count() <= before  # frozen objects may have been freed
        name = next(name for name in map("new module {}".format, range(10)) if name not in sys.modules)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        assert list(sparing_collector(iter(kept))) == kept
        assert gc.get_freeze_count() >= before + 1000 - 100
    finally:
        gc.unfreeze()
