"""The fuzz target without a fuzzer: its corpus, and reproducible mutations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.fuzz_decode import CORPUS, fuzz_one

MUTATIONS = 100  # of each input

inputs = sorted(CORPUS.iterdir())


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Damage the data one to four times: a byte changed, dropped or duplicated, the end removed, a huge length."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(5):
            case 0:
                damaged[at : at + 1] = bytes([chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])])
            case 1:
                del damaged[at : at + 1]
            case 2:
                damaged[at:at] = damaged[at : at + 8]
            case 3:
                del damaged[at:]
            case _:
                damaged[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
    return bytes(damaged)


@pytest.mark.parametrize("path", inputs, ids=lambda path: path.name)
def test_messages_of_the_corpus_and_its_mutations_raise_only_protocol_errors(path: Path) -> None:
    data = path.read_bytes()
    chance = random.Random(path.name)
    fuzz_one(data)
    for _ in range(MUTATIONS):
        fuzz_one(mutate(data, chance))


def test_an_empty_input_is_no_error() -> None:
    fuzz_one(b"")
