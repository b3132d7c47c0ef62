"""Functions that have a twin in C, and which of the two runs.

The innermost loops, those that every byte of a stream goes through, exist twice: as a Python function marked
@compiled, and in C in this folder under the same name. The Python one is the reference; it runs where there was no C
compiler when the package was installed, and the C function calls it for anything that is damaged or out of the
ordinary. So everything works without the compiled part, a few times slower, and the two cannot disagree about an error.

SUBSCRIBER_PURE in the environment has the Python functions run. A module that was built from other files than those
of this folder is not used: `make venv` builds it again.
"""

from __future__ import annotations

import copyreg
import importlib
import os
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")

SOURCE = Path(__file__).parent

_names: dict[int, str] = {}  # of twins, by their identity
references: dict[str, Any] = {}  # the Python functions and classes by their names in C


def fingerprint() -> str:
    """Return the fingerprint of the C files. A module that was compiled from them has the same one."""
    files = b"".join([file.read_bytes() for file in sorted(SOURCE.glob("*.[ch]"))])
    return f"{crc32(files):08x}"


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("SUBSCRIBER_PURE"):
        return None, "SUBSCRIBER_PURE is set"
    try:
        module = importlib.import_module("subscriber._speedups._native")
    except ImportError:
        return None, "it was not built"
    if SOURCE.exists() and fingerprint() != module.SOURCE:
        return None, "its source has changed since it was built"
    return module, ""


module, why_not = _load()  # the compiled module, or why it is not used


def compiled(reference: T, name: str | None = None) -> T:
    """Return the twin in C of a function or class, or `reference` itself if it has none.

    `name` is that of the twin; None: the module's and the function's, as in `row_extraction_extract_row`.
    """
    if name is None:
        name = f"{reference.__module__.rpartition('.')[2]}_{reference.__name__}"  # type: ignore[attr-defined]
    references[name] = reference
    if module is None:
        return reference
    module.refer(name, reference)
    twin: T = getattr(module, name)
    if not isinstance(twin, type | BuiltinFunctionType):  # one that reads values: tables refer to it
        _names[id(twin)] = name
        copyreg.pickle(type(twin), _by_name)
    return twin


def _by_name(twin: object) -> tuple[Any, ...]:
    """Pickle a twin by its name, because each process has its own."""
    return _found, (_names[id(twin)],)


def _found(name: str) -> Any:
    return references[name] if module is None else getattr(module, name)
