"""Former names of modules, which work for one more release with a DeprecationWarning.

MOVED has the modules that programs import according to the documentation. The rest of the package uses no former name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

# The old module, the new one, and what to import instead.
MOVED = {
    "subscriber.ops": ("subscriber.cli", "subscriber.cli"),
    "subscriber.ops.servers": ("subscriber.demo.servers", "subscriber.demo.servers"),
    "subscriber.pipeline": ("subscriber.spark", "subscriber.spark"),
    "subscriber.pipeline.changes": ("subscriber.spark.sources.pgchanges", "subscriber.spark"),
    "subscriber.pipeline.copy": ("subscriber.spark.copy.job", "subscriber.spark"),
    "subscriber.pipeline.lake": ("subscriber.spark.lake.lake", "subscriber.spark"),
    "subscriber.pipeline.snapshot": ("subscriber.spark.sources.pgsnapshot", "subscriber.spark"),
    "subscriber.pipeline.verify": ("subscriber.spark.verification", "subscriber.spark"),
}


class _Finder:
    """Finds and loads modules by their former names. It is the last finder, because a former name has no file.

    It implements the protocols of importlib.abc without that module, which takes longer to import than the rest of the
    package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        package = any(name.startswith(f"{fullname}.") for name in MOVED)
        return ModuleSpec(fullname, cast("Loader", self), is_package=package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # The import system would overwrite the name and the spec of the new module itself.
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        home, instead = MOVED[module.__name__]
        if module.__spec__ is not None and module.__spec__.submodule_search_locations is None:
            message = f"{module.__name__} has moved, and will be removed: import from {instead}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        new = import_module(home)
        module.__dict__.update({name: thing for name, thing in vars(new).items() if not name.startswith("__")})


def install() -> None:
    """Make former names importable. A second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
