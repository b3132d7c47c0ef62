"""Tests of objects once more, with gs:// and a program that stands for Google Cloud Storage.

Conditional PUTs are by generations there, and the removal of an object that does not exist is an error.
"""

from __future__ import annotations

import pytest

from subscriber.changelog.objects import ObjectPath
from tests.changelog.test_object_segments import (  # noqa: F401
    test_a_request_whose_answer_was_lost_is_repeated,
    test_one_of_several_writers_at_once_succeeds,
    test_retention_removes_the_oldest_segments,
)


@pytest.fixture
def objects(google_objects: ObjectPath) -> ObjectPath:
    return google_objects


def test_an_object_that_is_gone_can_be_removed(objects: ObjectPath) -> None:
    path = objects / "one"
    path.put(b"")
    for _ in range(2):
        path.unlink()
    assert not path.exists()
