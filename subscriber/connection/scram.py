"""The verifier that a server stores in place of a password, so that no statement has the password.

Source: scram_build_secret() in src/common/scram-common.c; RFC 5803.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

ITERATIONS = 4096  # PostgreSQL's default of scram_iterations
SALT_BYTES = 16
PASSWORD_BYTES = 24


def new_password() -> str:
    """Return a random password of 192 bits. It has only characters that no connection string has to quote."""
    return secrets.token_urlsafe(PASSWORD_BYTES)


def scram_verifier(password: str, salt: bytes | None = None, iterations: int = ITERATIONS) -> str:
    """Return the SCRAM-SHA-256 verifier of `password`, as `ALTER ROLE … PASSWORD` takes it.

    Args:
        password: ASCII characters. Others would have to be prepared by SASLprep.
        salt: None: a random one.

    Raises:
        ValueError: the password has other characters.
    """
    if not password.isascii():
        raise ValueError("the password has characters that are not ASCII")
    salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored_key = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    encoded = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return f"SCRAM-SHA-256${iterations}:{encoded[0]}${encoded[1]}:{encoded[2]}"
