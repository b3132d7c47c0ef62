"""Files with secrets, which only their owner may be able to read."""

from __future__ import annotations

import os
import shlex
import stat

from subscriber.errors import ConninfoError
from subscriber.redaction import redact
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_FILE

MOST_TEXT = 65_536  # characters


def read_private_file(name: str, what: str, write: str) -> str:
    """Return the text of a file that only its owner can read.

    Args:
        name: the file.
        what: the kind of file, for messages.
        write: a shell command whose output is an example of the text, for the hint if there is no such file.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it.
    """
    shown = shlex.quote(redact(name))  # a connection string by mistake
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConninfoError(f'{what} file "{name}" is not a plain file')
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConninfoError(
                    f'{what} file "{name}" has group or world access',
                    detail="Permissions should be u=rw (0600) or less.",
                    hint=Remedy(command=f"chmod 600 {shown}"),
                )
            return file.read(MOST_TEXT)
    except OSError as error:
        raise ConninfoError(
            f'could not open {what} file "{name}": {error.strerror}',
            hint=Remedy("write it", f"(umask 077; {write} > {shown})")
            if isinstance(error, FileNotFoundError)
            else None,
            sqlstate=UNDEFINED_FILE,
        ) from None
