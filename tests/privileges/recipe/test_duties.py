"""Roles of the recipe keep their duties without subscriptions, and workers store states that owners may not change."""

from __future__ import annotations

import pytest

from tests.privileges.recipe.scene import APPLY, LAUNCHER, Scene, named, of_new
from tests.privileges.recipe.test_check import PAIRS, problems

pytestmark = pytest.mark.xdist_group("recipe")
OURS = "pronamespace = 'subscriber'::regnamespace"


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_a_role_keeps_its_duty_without_its_last_subscription(scene: Scene) -> None:
    """The launcher drops its only subscription. The apply role owns one for a moment."""
    await scene.streaming()
    for owner in (APPLY, LAUNCHER):
        alter = ("exec", "--target", scene.target.dsn(), f"ALTER SUBSCRIPTION s OWNER TO {owner}")
        assert (await scene.subscriber(*alter)).returncode == 0, scene.said
    await scene.source.execute("INSERT INTO app.orders VALUES (200, 200)")
    await scene.source.wait_for_catchup("s")
    assert await problems(scene, "s") == []
    assert (await scene.as_recipe("verify", "s")).returncode == 0, scene.said
    assert (await scene.as_recipe("exec", "DROP SUBSCRIPTION s")).returncode == 0, scene.said
    assert (await scene.as_recipe("status")).stdout == "no subscriptions\n", scene.said
    await scene.target.execute("TRUNCATE app.orders")
    assert await scene.create(two_phase="false"), scene.said
    await scene.target.wait_for("SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel")
    assert "permission denied" not in scene.program.text


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_a_duty_is_taken_without_the_others(scene: Scene) -> None:
    assert await scene.administrators(await of_new(scene)), scene.said
    privileges = f"SELECT has_function_privilege($1, oid, 'EXECUTE') FROM pg_proc WHERE proname = $2 AND {OURS} LIMIT 1"

    async def may(role: str) -> set[str]:
        functions = ("lead", "bind_origin", "create_origin", "table_safety")
        return {name for name in functions if await scene.target.value(privileges, role, name)}

    inherited = {"create_origin", "table_safety"} if scene.majors[1] >= 16 else set()  # pg_create_subscription
    assert await may(LAUNCHER) == {"lead", "bind_origin", "create_origin", "table_safety"}
    await scene.target.execute(f"REVOKE {APPLY} FROM {LAUNCHER}")
    assert await may(APPLY) == {"bind_origin", "table_safety"}
    for duty in ("owner", "apply"):
        await scene.target.execute(f"SELECT subscriber.dismiss('{LAUNCHER}', '{duty}')")
    assert await may(LAUNCHER) == {"lead", "bind_origin", "create_origin", "table_safety"}
    await scene.target.execute(f"SELECT subscriber.dismiss('{LAUNCHER}', 'launcher')")
    assert await may(LAUNCHER) == inherited
    await scene.target.execute(f"SELECT subscriber.dismiss('{APPLY}', 'apply')")
    assert await may(APPLY) == set()


@pytest.mark.parametrize("majors", PAIRS, indirect=True, ids=named)
async def test_a_subscription_without_a_required_password(scene: Scene) -> None:
    """Its owner may not change it. The launcher stores its states: two_phase, and that it is disabled."""
    await scene.streaming(disable_on_error="true")
    alter = "ALTER SUBSCRIPTION s SET (password_required = false)"
    assert (await scene.subscriber("exec", "--target", scene.target.dsn(), alter)).returncode == 0, scene.said
    done = await scene.as_recipe("exec", "ALTER SUBSCRIPTION s SET (binary = false)")
    assert (done.returncode, "password_required=false is superuser-only" in done.stderr) == (3, True)
    with pytest.raises(Exception, match="password_required=false is superuser-only"):
        await scene.target.execute(
            f"SET ROLE {LAUNCHER}; UPDATE subscriber.subscription SET subconninfo = 'dbname=other' WHERE subname = 's'"
        )
    await scene.target.execute("INSERT INTO app.orders VALUES (500, 1)")
    await scene.source.execute("INSERT INTO app.orders VALUES (500, 2)")
    await scene.program.wait_for('subscription "s" has been disabled because of an error')
    assert await scene.target.value("SELECT subenabled FROM subscriber.subscription") is False
    assert scene.program.text.count("conflict=insert_exists") < 3
    await scene.target.execute("DELETE FROM app.orders WHERE id = 500")
    enable = "ALTER SUBSCRIPTION s SET (two_phase = true); ALTER SUBSCRIPTION s ENABLE"
    assert (await scene.subscriber("exec", "--target", scene.target.dsn(), enable)).returncode == 0, scene.said
    await scene.target.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
    await scene.source.wait_for_catchup("s")
