"""The figures of a comparison, as `subscriber.audit` stores them. They have no values of rows."""

from __future__ import annotations

from typing import Any

from subscriber.comparison.result import Comparison

MOST_SHOWN = 100  # tables with a difference


def summary_of(found: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison as a JSON value."""
    different = [table for table in found.tables if not table.is_same]
    return {
        "lsn": str(found.lsn),
        "tables": len(found.tables),
        "rows": sum(table.rows for table in found.tables),
        "different": len(different),
        "complete": found.is_complete,
        "shown": [
            {
                "table": table.name,
                "missing": table.missing_count,
                "extra": table.extra_count,
                "changed": table.changed_count,
                "outside": table.foreign_count,
                "note": table.note or ("too many differences to count" if table.differing_buckets else None),
            }
            for table in different[:MOST_SHOWN]
        ],
    }
