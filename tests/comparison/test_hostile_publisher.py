"""A publisher that lies to `subscriber verify`, which queries it in several connections."""

from __future__ import annotations

import pytest

from subscriber.cli.commands.verify import as_json, describe
from subscriber.comparison.checksums import add_up
from subscriber.comparison.comparison import verify
from subscriber.display import json_text, printable
from subscriber.errors import ProtocolError
from tests.plugins.fix_hostile import LIES
from tests.scenarios.test_hostile_publisher import CREATE, Scene, is_quick, scene, settled

__all__ = ["scene"]
ONE = (1).to_bytes(8)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("at_length", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_a_lie_in_each_field(scene: Scene, at_length: bool) -> None:
    await scene.execute(CREATE.format(dsn=scene.dsn, options="copy_engine = snapshot"))
    scene.subscriber.start()
    await settled(scene)
    await scene.subscriber.wait_for_ready(scene.source)
    scene.liar.seen.clear()

    async def compare() -> None:
        comparison = await verify(scene.target.dsn(), "s")
        scene.outputs += [*map(printable, describe(comparison)), json_text(as_json(comparison))]

    await scene.attempt(compare)
    assert any(output.startswith("identical") for output in scene.outputs)
    told = [name for name in scene.liar.seen if at_length or (is_quick(name) and not name.startswith("parameter"))]
    assert len(told) > 10
    if not at_length:
        told = told[::3]
    for number, name in enumerate(told):
        for lie in LIES if at_length else [LIES[number % len(LIES)]]:
            scene.liar.tell(name, lie)
            await scene.attempt(compare)
            scene.liar.tell(None)
            await scene.check(f"{name}: {lie!r:.20}")
    assert not scene.wrong, "\n".join(scene.wrong)


@pytest.mark.parametrize(
    "row", [("0) OR (true", ONE, ONE), (1, ONE, ONE), (ONE, None, ONE), (ONE, ONE, b"1"), (ONE, ONE), ()]
)
def test_buckets_are_numbers(row: tuple[object, ...]) -> None:
    """The next statement for the target names them."""
    with pytest.raises(ProtocolError):
        add_up([[row]])
