from __future__ import annotations

from tests.faults.environment import faults as faults
