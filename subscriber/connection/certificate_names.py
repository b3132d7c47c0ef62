"""Whether the certificate of a server is for a host, by libpq's rules, which Python's ssl module does not have.

- A name of the certificate is compared with the host as text, also if the host is an IP address. A leading `*.` stands
  for one label.
- The common name counts if the certificate has no alternative name of the host's kind: DNS name or IP address.

Source: src/interfaces/libpq/fe-secure-common.c and pgtls_verify_peer_name_matches_certificate_guts() in
fe-secure-openssl.c.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

Certificate = Mapping[str, Any]  # as ssl.SSLObject.getpeercert() returns it


def names_of(certificate: Certificate, host: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds and the names of a certificate that count for a host."""
    kind = "DNS" if _address(host) is None else "IP Address"
    alternatives = certificate.get("subjectAltName", ())
    yield from (entry for entry in alternatives if entry[0] in ("DNS", "IP Address"))
    if not any(entry[0] == kind for entry in alternatives):
        names = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
        yield from (("DNS", name) for name in islice(names, 1))


def is_for(certificate: Certificate, host: str) -> bool:
    """Return True if one of the names of a certificate is that of the host."""
    address = _address(host)
    return any(
        matches(name, host) if kind == "DNS" else address is not None and _address(name) == address
        for kind, name in names_of(certificate, host)
    )


def matches(name: str, host: str) -> bool:
    """Return True if a name of a certificate, perhaps with a wildcard, is that of a host."""
    if "\0" in name:
        return False
    if name.casefold() == host.casefold():
        return True
    rest = name[1:]
    if len(name) < 3 or not name.startswith("*.") or len(name) > len(host):
        return False
    label = host[: len(host) - len(rest)]
    return host.casefold().endswith(rest.casefold()) and "." not in label


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
