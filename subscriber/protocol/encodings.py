"""Text of a session in the encodings that a PostgreSQL database can have, as Python's str and back.

A session whose rows go from one database to the other is in the encoding of the target's database, as that of
PostgreSQL's own subscriber. Values are not decoded on the way. Names are, and so are the values that functions
of the user read.

Every sequence of bytes can be decoded, and encoding gives the same bytes again: what the codec does not know, or would
write otherwise, becomes surrogate escapes. Those of EUC_TW and MULE_INTERNAL are all that is not ASCII, because Python
has no codec for them. Text of a database in SQL_ASCII is taken for UTF-8.

Source: src/common/encnames.c; the chapter "Character Set Support" of the documentation.
"""

from __future__ import annotations

from subscriber.errors import ProtocolError
from subscriber.sqlstate import UNTRANSLATABLE_CHARACTER

UTF8 = "utf-8"  # Python's name; the default everywhere
ERRORS = "surrogateescape"

# PostgreSQL's names of the encodings a database can have, as a server reports them, and Python's.
CODECS = {
    "SQL_ASCII": UTF8,
    "UTF8": UTF8,
    "EUC_CN": "gb2312",
    "EUC_JIS_2004": "euc_jis_2004",
    "EUC_JP": "euc_jp",
    "EUC_KR": "euc_kr",
    "EUC_TW": "ascii",
    "MULE_INTERNAL": "ascii",
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    **{f"ISO_8859_{part}": f"iso8859-{part}" for part in (5, 6, 7, 8)},
    **{f"LATIN{number}": f"latin{number}" for number in range(1, 11)},
    **{f"WIN{page}": f"cp{page}" for page in (866, 874, *range(1250, 1259))},
}


def codec(encoding: str) -> str:
    """Python's name for an encoding of PostgreSQL. Raises ProtocolError for one that no database can have."""
    try:
        return CODECS[encoding]
    except KeyError:
        raise ProtocolError(f'the server uses the encoding "{encoding}", which is not known here') from None


def decode(data: bytes, codec: str = UTF8) -> str:
    """Text of a session; encode() gives the same bytes again."""
    text = data.decode(codec, ERRORS)
    if codec != UTF8 and text.encode(codec, ERRORS) != data:  # two sequences of bytes for one character
        return data.decode("ascii", ERRORS)
    return text


def is_text(text: str) -> bool:
    """Return True if decode() could decode all bytes of `text`. Other text cannot be sent to another session."""
    return not any("\udc80" <= character <= "\udcff" for character in text)


def encode(text: str, codec: str = UTF8) -> bytes:
    """Text for a session. Raises ProtocolError (22P05) for a character that the encoding does not have."""
    try:
        return text.encode(codec, ERRORS)
    except UnicodeEncodeError as error:
        raise ProtocolError(
            f"character U+{ord(text[error.start]):04X} has no equivalent in the encoding of the session, {codec}",
            sqlstate=UNTRANSLATABLE_CHARACTER,
        ) from None
