"""Any bytes raise ProtocolError, or decode to a message that encodes to the same bytes.

    python -m tests.fuzz.fuzz_decode tests/fuzz/corpus      with atheris installed: fuzz until stopped
    pytest tests/fuzz                                       the corpus, and mutations of it

An input's first byte selects the reader of the rest, see fuzz_one(). The corpus has one file for each kind of message.
Add an input that once failed, under a name that describes the failure.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from subscriber.errors import ProtocolError
from subscriber.protocol import copy_data
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuple_data import TupleData

CORPUS = Path(__file__).parent / "corpus"

IN_BLOCK = 1  # bits of the first byte
PARALLEL = 2
ENVELOPE = 4


def fuzz_one(data: bytes) -> None:
    """Read one input. An AssertionError or anything else than ProtocolError is a bug."""
    if not data:
        return
    mode, data = data[0], data[1:]
    with suppress(ProtocolError):
        if mode & ENVELOPE:
            frame = copy_data.decode_from_publisher(data)
            assert frame is None or copy_data.encode(frame) == data
            status = copy_data.decode_from_subscriber(data)
            assert copy_data.encode(status) == data
        else:
            _message(data, Decoder(in_block=bool(mode & IN_BLOCK), parallel=bool(mode & PARALLEL)))


def _message(data: bytes, decoder: Decoder) -> None:
    message = decoder.decode(data)
    assert encode(message) == data
    match message:
        case Insert(new=row) | Delete(old=row):
            _row(row)
        case Update(old=old, new=row):
            _row(row)
            if old is not None:
                _row(old)


def _row(row: TupleData) -> None:
    status, values = row.split()
    assert len(status) == len(values) == row.ncols
    assert TupleData.join(status, values) == row


def main() -> None:
    import atheris  # type: ignore[import-untyped]

    atheris.instrument_all()
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
