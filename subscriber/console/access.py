"""Who may act on the console: tokens, sessions, and a limit of attempts. No I/O here.

A token is a long random text with the label of a person, which nobody can guess. So the limit of attempts keeps the log
readable, and refuses no right token: many people share an address, as that of a proxy. The page sends the token once,
in the body of a request, and receives the key of a session. Actions carry this key in the header Authorization, which a
browser never adds by itself, so another site cannot act in the name of a person.

Tokens and keys are compared as digests, in constant time. Sessions are in memory: a request that was recorded is
refused after a restart of the process, and after the end of its session.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv6Address, ip_address, ip_network
from time import monotonic

from subscriber.errors import ConninfoError
from subscriber.remedy import Remedy

SHORTEST_TOKEN = 32  # characters
FEWEST_CHARACTERS = 10  # different ones in a token
WRITE_TOKENS = "python3 -c 'import secrets; print(\"ops:\" + secrets.token_urlsafe(32))'"

ATTEMPTS = 5  # wrong tokens of an address
ATTEMPTS_WINDOW = 60.0  # seconds
MOST_ADDRESSES = 1000  # whose attempts are remembered

IDLE_LIMIT = 900.0  # seconds without an action after which a session ends
SESSION_LIMIT = 8 * 3600.0  # seconds after which it ends in any case
MOST_SESSIONS = 16

_LINE = re.compile(r"([\w.@+-]{1,63}):([!-~]+)", re.ASCII)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a console, as digests."""

    _digests: tuple[tuple[str, bytes], ...]

    @classmethod
    def parse(cls, text: str, where: str) -> Tokens:
        """Parse lines of LABEL:TOKEN. Empty lines, and those that begin with #, are ignored.

        Args:
            text: the lines.
            where: the name of the file or the variable, for messages.

        Raises:
            ConninfoError: a line is invalid, a token is shorter than SHORTEST_TOKEN or not random, or there is none.
        """
        tokens = []
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise _invalid(f"line {number} of {where} is not LABEL:TOKEN")
            if len(match[2]) < SHORTEST_TOKEN:
                raise _invalid(f"the token in line {number} of {where} is shorter than {SHORTEST_TOKEN} characters")
            if len(set(match[2])) < FEWEST_CHARACTERS:
                raise _invalid(f"the token in line {number} of {where} is not random")
            tokens.append((match[1], _digest(match[2])))
        if not tokens:
            raise _invalid(f"{where} has no token")
        return cls(tuple(tokens))

    def find(self, token: str) -> str | None:
        """Return the label of a token; None if it is not one. All tokens are compared."""
        given, label = _digest(token), None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                label = name
        return label


def _invalid(message: str) -> ConninfoError:
    return ConninfoError(message, hint=Remedy("make a line", WRITE_TOKENS))


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()


class AttemptLimit:
    """Counts the wrong tokens of each address: ATTEMPTS in ATTEMPTS_WINDOW are answered and logged."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, deque[float]] = {}

    def wait(self, address: str) -> float:
        """Return the seconds for which wrong tokens of the address are not logged any more; 0: they are logged."""
        failures = self._failures.get(_network(address))
        if failures is None or len(failures) < ATTEMPTS:
            return 0.0
        return max(0.0, failures[0] + ATTEMPTS_WINDOW - self._clock())

    def fail(self, address: str) -> None:
        """Count a wrong token."""
        network = _network(address)
        failures = self._failures.pop(network, None) or deque(maxlen=ATTEMPTS)
        failures.append(self._clock())
        self._failures[network] = failures
        if len(self._failures) > MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]


def _network(address: str) -> str:
    """Return the address, or the network of an IPv6 address: one client has all addresses of a /64."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ip_network((parsed, 64), strict=False))


@dataclass(slots=True)
class _Session:
    label: str
    began: float
    used: float


class Sessions:
    """The sessions of persons who have shown a token."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}

    def open(self, label: str) -> str:
        """Open a session. Returns its key. The oldest one ends if there are MOST_SESSIONS."""
        key, now = secrets.token_urlsafe(32), self._clock()
        self._forget_ended()
        if len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[_digest(key)] = _Session(label, now, now)
        return key

    def use(self, key: str) -> str | None:
        """Return the label of an open session; None if there is none with this key."""
        self._forget_ended()
        # The digest of a guessed key says nothing about other keys, so the time of the lookup does not either.
        session = self._sessions.get(_digest(key))
        if session is None:
            return None
        session.used = self._clock()
        return session.label

    def close(self, key: str) -> None:
        """Close a session. Does nothing if there is none with this key."""
        self._sessions.pop(_digest(key), None)

    def _forget_ended(self) -> None:
        now = self._clock()
        self._sessions = {
            digest: session
            for digest, session in self._sessions.items()
            if now - session.used < IDLE_LIMIT and now - session.began < SESSION_LIMIT
        }
