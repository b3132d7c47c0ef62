"""Servers as packaged by a vendor: Debian's, with JIT, ICU and translated messages, which the wheels lack.

    python -m tests.matrix.debian 17            ensures that PostgreSQL 17 is available, and prints its `bin` directory
    SUBSCRIBER_TEST_TARGET_BIN=$(python -m tests.matrix.debian 17) pytest …

An installed package is used in its place. Any other package is downloaded by apt with its dependencies into the cache:
from this machine's Debian mirror, checked by Debian's signatures. Nothing is installed. A downloaded program runs in
its own mount namespace, in which the packages' /usr covers the machine's /usr. Data directories, ports and processes
are the machine's. This needs neither root nor a container, but a kernel that permits user namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from subscriber.demo.servers import Account
from tests.cache import cache_directory, fill
from tests.matrix.programs import NotAvailable

# Major -> the suites that have it and its dependencies, and packages that apt would install with it by default.
SUITES = {
    13: ("bullseye", []),
    15: ("bookworm", []),
    17: ("trixie", []),
    18: ("sid", ["postgresql-18-jit", "postgresql-18-pglogical"]),
    19: ("sid experimental", []),
}
# Programs for the wrapper, initdb and localedef. Every Debian machine has them, so no package depends on them.
ESSENTIAL = ("dash", "coreutils", "util-linux", "gzip")
LOCALE = "de_DE.UTF-8"  # has_locale() of fetched servers, so that lc_messages can be another language

_LOCALE_PLACE = "lib/locale/de_DE.utf8"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_APT = """
Dir::State "{work}/state";
Dir::State::status "{work}/status";
Dir::Cache "{work}/cache";
Dir::Etc::sourcelist "{work}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "{work}/preferences";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Languages "none";
// What this machine does after an update is about its own lists and packages.
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""
# unshare keeps the capability to mount, setpriv drops it: the program has only the rights of the user who runs it.
_IN_PACKAGES = """\
exec unshare --user --map-current-user --keep-caps --mount sh -c '
  mount --rbind "$0" /usr && exec setpriv --ambient-caps=-all --inh-caps=-all -- "$@"' """
# apt prefers the older library of sid.
_PREFERENCES = """\
Package: libpq5
Pin: release a=experimental
Pin-Priority: 990
"""
_WRAPPER = f"""\
#!/bin/sh
# Runs Debian's program of this name, with the packages' /usr in the place of the machine's.
place=$(cd "$(dirname "$0")/.." && pwd -P)
{_IN_PACKAGES} "$place/root/usr" "/usr/lib/postgresql/MAJOR/FOLDER/$(basename "$0")" "$@"
"""
# Programs outside of bin/ that are wrapped as well: PostgreSQL's own tests call it.
_REGRESS = "lib/pgxs/src/test/regress"
_NOT_NEEDED = ("etc", "var", "usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/perl", "usr/share/lintian")


def debian(major: int) -> Path:
    """Return the `bin` directory of Debian's PostgreSQL, installed or downloaded. Raises NotAvailable."""
    installed = Path(f"/usr/lib/postgresql/{major}/bin")
    return installed if (installed / "postgres").exists() else fetched(major)


def fetched(major: int) -> Path:
    """Return the downloaded programs, even if the package is installed. Raises NotAvailable."""
    if major not in SUITES:
        raise NotAvailable(f"no suite of Debian has PostgreSQL {major}")
    try:
        place = fill(cache_directory("debian") / str(major), partial(_fetch, major))
        command = [str(place / "bin/postgres"), "--version"]
        _run(command, "fetched programs do not run here", **Account.current().keywords)
    except NotAvailable as reason:
        raise NotAvailable(f"{reason} (Debian: apt-get install postgresql-{major})") from None
    return place / "bin"


def has_locale(bin: Path) -> bool:
    """Return True if servers of these programs support LOCALE."""
    usr = bin.parent / "root/usr" if (bin.parent / "root").exists() else Path("/usr")
    return (usr / _LOCALE_PLACE).exists()


def _fetch(major: int, work: Path) -> None:
    """Make bin/ and root/ in `work`, and nothing else in the end."""
    for program in ("apt-get", "dpkg-deb", "unshare", "setpriv"):
        if shutil.which(program) is None:
            raise NotAvailable(f"there is no {program} to fetch or to run Debian's packages with")
    if not KEYRING.exists():
        raise NotAvailable(f"there is no {KEYRING} to check Debian's packages by")
    suites, more = SUITES[major]
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (work / directory).mkdir(parents=True)
    (work / "status").touch()
    (work / "apt.conf").write_text(_APT.format(work=work))
    (work / "preferences").write_text(_PREFERENCES)
    mirror = _mirror()
    sources = [f"deb [signed-by={KEYRING}] {mirror} {suite} main\n" for suite in suites.split()]
    (work / "sources.list").write_text("".join(sources))
    print(f"Fetching PostgreSQL {major} of Debian {suites} …", file=sys.stderr, flush=True)
    apt = ["apt-get", "-c", str(work / "apt.conf"), "-qq"]
    failure = f"apt could not fetch PostgreSQL {major} of Debian {suites}"
    _run([*apt, "update"], failure)
    install = ["install", "--yes", "--no-install-recommends", "--download-only"]
    _run([*apt, *install, f"postgresql-{major}", *more, *ESSENTIAL], failure)
    _unpack(sorted((work / "cache/archives").glob("*.deb")), work / "root")
    _make_locale(work / "root/usr")
    _wrap(major, work)
    for name in ("state", "cache"):
        shutil.rmtree(work / name)
    for name in ("status", "apt.conf", "preferences", "sources.list"):
        (work / name).unlink()


def _mirror() -> str:
    """Return the mirror from which this machine gets Debian's packages."""
    listed = _run(["apt-get", "update", "--print-uris"], "apt does not say where packages come from")
    match = re.search(r"^'(\S+/debian)/dists/[^/]+/InRelease'", listed, re.MULTILINE)
    if match is None:
        raise NotAvailable("apt has no source of Debian's packages here")
    return match[1]


def _unpack(packages: Sequence[Path], root: Path) -> None:
    for directory in ("bin", "sbin", "lib", "lib64"):  # older packages have files there, which belong to /usr by now
        (root / "usr" / directory).mkdir(parents=True)
        (root / directory).symlink_to(f"usr/{directory}")
    extract = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--no-same-owner", "--no-same-permissions"]
    extract += [f"--exclude=./{path}" for path in _NOT_NEEDED]
    for package in packages:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as opened:
            _run(extract, f"{package.name} could not be unpacked", stdin=opened.stdout)
    if not (shell := root / "usr/bin/sh").exists():  # which the package makes while it is installed
        shell.symlink_to("dash")


def _make_locale(usr: Path) -> None:
    name, _, charmap = LOCALE.partition(".")
    command = ["localedef", "-i", name, "-f", charmap, f"/usr/{_LOCALE_PLACE}"]
    _run(["sh", "-c", f'{_IN_PACKAGES} "$@"', "sh", str(usr), *command], f"locale {LOCALE} could not be made")


def _wrap(major: int, place: Path) -> None:
    """Write a script for each program. It finds its packages relative to itself, so both can be moved together."""
    (place / "bin").mkdir()
    for folder in ("bin", _REGRESS):
        for program in (place / f"root/usr/lib/postgresql/{major}/{folder}").glob("*"):
            script = place / "bin" / program.name
            script.write_text(_WRAPPER.replace("MAJOR", str(major)).replace("FOLDER", folder))
            script.chmod(0o755)


def _run(command: Sequence[str], failure: str, **keywords: Any) -> str:
    """Run the command. Returns its output. Raises NotAvailable with its error output."""
    environment = {**os.environ, "LC_ALL": "C"}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd="/", env=environment, **keywords
    )
    if done.returncode != 0:
        raise NotAvailable(f"{failure}: {done.stderr.strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(debian(int(sys.argv[1])))
    except NotAvailable as reason:
        sys.exit(str(reason))
