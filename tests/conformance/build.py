"""A PostgreSQL with its tests: from a variable, or Debian's source package built in the user's cache.

Debian's mirrors do not keep the source of PostgreSQL 19, so its servers and test modules are those of the binary
packages, and the tests are 18's. POSTGRES_TESTS names a directory with further tests.

Nothing is installed in the system, and root is not needed. The Debian mirror is apt's own. Its lists and archives are
kept separate from apt's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from subscriber.demo.servers import Account
from tests.cache import cache_directory
from tests.matrix.debian import fetched
from tests.matrix.programs import NotAvailable

MAJOR = 18  # the version whose source is built
PACKAGED = 19  # the version whose programs are downloaded
NEEDED = ("make", "gcc", "bison", "flex", "perl", "prove")
CONFIGURE = ("--enable-tap-tests", "--enable-injection-points", "--without-readline", "--without-zlib")
# In addition to the server; the tests do not need the rest of contrib.
MODULES = ("contrib/hstore", "contrib/postgres_fdw", "src/test/modules/injection_points", "src/test/regress")


@dataclass(frozen=True)
class Installation:
    tests: Path  # src/test/subscription of a source tree
    bin: Path
    perl: Path  # the modules PostgreSQL::Test

    @property
    def files(self) -> list[Path]:
        """The test files, by name. Those of POSTGRES_TESTS replace others of the same name."""
        by_name = {path.name: path for path in (self.tests / "t").glob("*.pl")}
        if more := os.environ.get("POSTGRES_TESTS"):
            by_name |= {path.name: path for path in Path(more).resolve().glob("*.pl")}
        return [by_name[name] for name in sorted(by_name)]

    def _config(self, option: str) -> str:
        command = [str(self.bin / "pg_config"), option]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def version(self) -> str:
        return self._config("--version").split()[1]

    @property
    def pg_regress(self) -> Path:
        packaged = self.bin / "pg_regress"
        return packaged if packaged.exists() else Path(self._config("--pgxs")).parent.parent / "test/regress/pg_regress"

    @property
    def icu(self) -> bool:
        return "--without-icu" not in self._config("--configure")

    @property
    def injection_points(self) -> bool:
        return "--enable-injection-points" in self._config("--configure")


def find_installation(major: int) -> Installation:
    """Return the installation of the environment variables, or a downloaded and built one of this version.

    Exits if a part is missing.
    """
    _need_perl_module("IPC::Run")
    given = os.environ.get("POSTGRES_SRC")
    source = Path(given).resolve() if given else _fetched(MAJOR)
    if not (source / "src/test/subscription/t").is_dir():
        sys.exit(f"{source} is no source tree of PostgreSQL: it has no src/test/subscription/t")
    programs = os.environ.get("POSTGRES_BIN")
    tests, perl = source / "src/test/subscription", source / "src/test/perl"
    if major == PACKAGED:
        try:
            bin = fetched(major)
        except NotAvailable as reason:
            sys.exit(str(reason))
        installation = Installation(tests, bin, bin.parent / f"root/usr/lib/postgresql/{major}/lib/pgxs/src/test/perl")
    else:
        installation = Installation(tests, Path(programs).resolve() if programs else _built(source), perl)
    account = Account.current()
    for path in (installation.tests, installation.bin):
        if not account.can_enter(path):
            sys.exit(f"user nobody, who has to run the servers for root, cannot enter {path}: see XDG_CACHE_HOME")
    return installation


def _need_perl_module(name: str) -> None:
    if subprocess.run(["perl", f"-M{name}", "-e1"], capture_output=True, check=False).returncode != 0:
        sys.exit(f"perl has no module {name}; on Debian it is in package lib{name.lower().replace('::', '-')}-perl")


# --- fetching -------------------------------------------------------------------------------------


def _fetched(major: int) -> Path:
    place = cache_directory("conformance")
    if sources := sorted(place.glob(f"postgresql-{major}[.br]*/configure")):  # an unpacked source, not a build
        return sources[-1].parent
    if shutil.which("apt-get") is None:
        sys.exit("there is no apt-get to fetch PostgreSQL's source with: set POSTGRES_SRC to a source tree")
    print(f"Fetching the source of PostgreSQL {major} …", flush=True)
    (place / "lists/partial").mkdir(parents=True, exist_ok=True)
    (place / "archives/partial").mkdir(parents=True, exist_ok=True)
    (place / "sources.list").write_text(f"deb-src {_mirror()} sid main\n")
    apart = {
        "Dir::Etc::SourceList": place / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": place / "lists",
        "Dir::Cache": place,
        "APT::Sandbox::User": "",  # apt's own user may not read our cache
    }
    options = [word for name, value in apart.items() for word in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "-qq", "update"], place)
    _run(["apt-get", *options, "-qq", "source", "--download-only", f"postgresql-{major}"], place)
    (archive,) = place.glob(f"postgresql-{major}_*.orig.tar.*")
    _run(["tar", "-xf", str(archive)], place)
    return _fetched(major)


def _mirror() -> str:
    """Debian's mirror as apt knows it."""
    text = subprocess.run(["apt-get", "indextargets"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(?m)^Site: (http.*debian\S*)$", text)
    return match[1] if match and "security" not in match[1] else "http://deb.debian.org/debian"


# --- building -------------------------------------------------------------------------------------


def _built(source: Path) -> Path:
    place = cache_directory("conformance") / f"{source.name}-installed"
    if (place / "bin/postgres").exists():
        return place / "bin"
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        sys.exit(f"building PostgreSQL needs {', '.join(missing)}; or set POSTGRES_BIN to an installation")
    print("Building it …", flush=True)
    work = place.with_name(f"{source.name}-build")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    unfinished = place.with_name(f"{place.name}.tmp")
    icu = [] if _has_icu() else ["--without-icu"]
    _run([str(source / "configure"), f"--prefix={place}", *CONFIGURE, *icu], work)
    _run(["make", "-s", f"-j{os.cpu_count() or 1}"], work)
    # Installed aside and moved when it is complete, so that an interrupted build is not taken for one.
    for directory in (".", *MODULES):
        _run(["make", "-s", "-C", directory, f"DESTDIR={unfinished}", "install"], work)
    (unfinished / place.relative_to("/")).rename(place)
    shutil.rmtree(unfinished)
    shutil.rmtree(work)
    return place / "bin"


def _has_icu() -> bool:
    return subprocess.run(["pkg-config", "--exists", "icu-uc", "icu-i18n"], check=False).returncode == 0


def _run(command: list[str], directory: Path) -> None:
    """Run a command silently unless it fails."""
    done = subprocess.run(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
