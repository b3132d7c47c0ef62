"""The scenarios of the explorer: the states that one task loads and another one changes."""

from tests.interleavings.scenarios.archive import archive
from tests.interleavings.scenarios.cutover import cutover
from tests.interleavings.scenarios.quarantine import quarantine
from tests.interleavings.scenarios.ranges import ranges
from tests.interleavings.scenarios.repair import repairs, resyncs
from tests.interleavings.scenarios.streaming import streaming
from tests.interleavings.scenarios.table_sync import table_sync

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        *ranges(),
        *table_sync(),
        *repairs(),
        *resyncs(),
        *quarantine(),
        *streaming(),
        *cutover(),
        *archive(),
    )
}
