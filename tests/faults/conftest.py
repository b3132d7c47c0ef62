from __future__ import annotations

from tests.faults.scene import faults as faults
