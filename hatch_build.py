"""Compiles the C files of subscriber/_speedups where it can. The package is complete without them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from zlib import crc32

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = build(Path(self.root, "subscriber", "_speedups"))
        if built is not None:
            build_data["artifacts"].append(f"/{built.relative_to(self.root)}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def build(source: Path) -> Path | None:
    """Compile the folder `source` into a module in it; None, after a line that says why, if it cannot be."""
    target = source / ("_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    target.unlink(missing_ok=True)
    if os.environ.get("SUBSCRIBER_PURE"):
        return _not_built("SUBSCRIBER_PURE is set")
    linker = shlex.split(os.environ.get("LDSHARED") or sysconfig.get_config_var("LDSHARED") or "cc -shared")
    flags = ["-O2", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-DNDEBUG", *shlex.split(os.environ.get("CFLAGS", ""))]
    include = f"-I{sysconfig.get_path('include')}"
    files = b"".join([file.read_bytes() for file in sorted(source.glob("*.[ch]"))])
    fingerprint = f'-DSOURCE="{crc32(files):08x}"'  # as subscriber/_speedups.py has it
    unfinished = target.with_suffix(".unfinished")
    command = [*linker, *flags, include, fingerprint, str(source / "module.c"), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        return _not_built(str(error))
    except subprocess.CalledProcessError as error:
        return _not_built(next((line for line in error.stderr.splitlines() if "error" in line), str(error)))
    return unfinished.replace(target)


def _not_built(reason: str) -> None:
    print(f"subscriber: without its compiled part, which only makes it faster: {reason}", file=sys.stderr)
