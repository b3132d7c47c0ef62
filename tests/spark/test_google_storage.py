"""The tests of object stores once more, with gs:// and a program that stands for Google Cloud Storage.

They show that log, lake and tables of apply_changes() need nothing of Amazon's protocol. More of them are in
tests/changelog/test_google_storage.py.
"""

from __future__ import annotations

import pytest

from subscriber.changelog.objects import ObjectPath
from tests.archive.test_standby import (  # noqa: F401
    start,
    test_archivers_of_an_object_store_replace_killed_ones,
)
from tests.changelog.test_object_segments import (  # noqa: F401
    test_a_change_counts_when_its_segment_is_stored,
    test_a_killed_writer_has_stored_a_segment_but_not_its_position,
    test_a_large_segment_is_read_in_few_requests,
    test_a_position_without_changes_needs_no_segment,
    test_a_second_writer_is_refused,
    test_a_writer_is_killed_in_the_middle,
    test_a_writer_whose_lease_was_taken_stores_nothing,
    test_less_than_was_confirmed_is_damage,
    test_retention_keeps_what_a_consumer_has_not_read,
    test_segments_are_read_and_continued,
    writer,
)
from tests.spark.test_lake_object_store import (  # noqa: F401 - tests, and the fixture that they use
    scene,
    test_a_batch_of_a_process_that_has_lost_the_lease,
    test_commands_are_killed_and_two_of_them_exclude_each_other,
    test_iceberg_tables_and_a_catalog_of_ones_own,
    test_names_that_need_an_escape,
    test_the_lake_follows_and_survives_interruptions_and_maintenance,
)
from tests.spark.test_object_store import (  # noqa: F401
    test_a_snapshot_by_ranges,
    test_spark_reads_log_and_snapshot,
    test_tables_of_apply_changes,
    test_the_archiver_is_killed,
)

pytestmark = pytest.mark.soak


@pytest.fixture
def objects(google_objects: ObjectPath) -> ObjectPath:
    return google_objects


@pytest.fixture
def rest_catalog() -> str:
    pytest.skip("the tables of the REST catalog are in its own store")
