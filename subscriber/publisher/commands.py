"""The replication commands of each server version, as text. Nothing here talks to a server.

Source: src/backend/replication/libpqwalreceiver/libpqwalreceiver.c and repl_gram.y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subscriber import quoting
from subscriber import server_features as features
from subscriber.lsn import Lsn
from subscriber.subscription import OPTIONS

Snapshot = Literal["export", "use", "nothing"]

_BARE = {"export": "EXPORT_SNAPSHOT", "use": "USE_SNAPSHOT", "nothing": "NOEXPORT_SNAPSHOT"}


def create_slot(
    name: str, server_version: int, *, snapshot: Snapshot, two_phase: bool, failover: bool, temporary: bool
) -> str:
    """CREATE_REPLICATION_SLOT for pgoutput: options in parentheses since 15, bare words before."""
    options = ["TWO_PHASE"] if two_phase else []
    options += ["FAILOVER"] if failover else []
    if features.SLOT_OPTIONS_IN_PARENTHESES.is_in(server_version):
        text = "(" + ", ".join([*options, f"SNAPSHOT '{snapshot}'"]) + ")"
    else:
        text = " ".join([*options, _BARE[snapshot]])
    return f"CREATE_REPLICATION_SLOT {quoting.identifier(name)}{' TEMPORARY' * temporary} LOGICAL pgoutput {text}"


def drop_slot(name: str, *, wait: bool) -> str:
    return f"DROP_REPLICATION_SLOT {quoting.identifier(name)}{' WAIT' * wait}"


def alter_slot(name: str, *, failover: bool | None, two_phase: bool | None) -> str:
    """ALTER_REPLICATION_SLOT; None leaves an option as it is."""
    options = [
        f"{keyword} {'true' if value else 'false'}"
        for keyword, value in (("FAILOVER", failover), ("TWO_PHASE", two_phase))
        if value is not None
    ]
    return f"ALTER_REPLICATION_SLOT {quoting.identifier(name)} ( {', '.join(options)} )"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of START_REPLICATION for a subscription. Those that an old publisher does not know are left out."""

    publications: tuple[str, ...]
    proto_version: int | None = None  # None: the newest the publisher has
    binary: bool = False
    streaming: Literal["off", "on", "parallel"] = "off"
    two_phase: bool = False
    origin: str | None = None  # any or none; None leaves it to the publisher, which takes any
    messages: bool = False  # logical decoding messages too, which a subscription never asks for


def proto_version(server_version: int) -> int:
    """The newest protocol version of a server: 1 until 13, then one more with each of 14, 15 and 16."""
    steps = (features.STREAMING, features.TWO_PHASE_DECODING, features.PARALLEL_STREAMING)
    return 1 + sum(feature.is_in(server_version) for feature in steps)


def negotiated_streaming(options: StreamOptions, server_version: int) -> Literal["off", "on", "parallel"]:
    """Return the value of `streaming` that a server of this version supports."""
    if options.streaming == "off" or not OPTIONS["streaming"].is_supported_by(server_version):
        return "off"
    return "parallel" if options.streaming == "parallel" and features.PARALLEL_STREAMING.is_in(server_version) else "on"


def start_replication(slot: str, start: Lsn, options: StreamOptions, server_version: int) -> str:
    """START_REPLICATION for pgoutput.

    `start` 0 means where the slot stands; a position below that means the same.
    """
    names = ",".join(quoting.identifier(name) for name in options.publications)
    given = {"proto_version": str(options.proto_version or proto_version(server_version))}
    if (streaming := negotiated_streaming(options, server_version)) != "off":
        given["streaming"] = streaming
    if options.two_phase and OPTIONS["two_phase"].is_supported_by(server_version):
        given["two_phase"] = "on"
    if options.origin is not None and OPTIONS["origin"].is_supported_by(server_version):
        given["origin"] = options.origin
    given["publication_names"] = names
    if options.binary and OPTIONS["binary"].is_supported_by(server_version):
        given["binary"] = "true"
    if options.messages and features.DECODED_MESSAGES.is_in(server_version):
        given["messages"] = "true"
    text = ", ".join(f"{name} {quoting.replication_literal(value)}" for name, value in given.items())
    return f"START_REPLICATION SLOT {quoting.identifier(slot)} LOGICAL {start} ({text})"
