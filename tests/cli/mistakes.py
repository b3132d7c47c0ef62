"""Mistakes of a newcomer, with the error of each and the way on. test_mistakes.py makes them in this order.

Mistakes that need several steps or servers of their own are in test_commands_of_errors.py and test_next_commands.py.
"""

from __future__ import annotations

from dataclasses import dataclass

CREATE = "CREATE SUBSCRIPTION cities CONNECTION '{source}' PUBLICATION atlas"
READER = "CREATE SUBSCRIPTION cities CONNECTION '{source} user=reader' PUBLICATION atlas"
DUMP = """pg_dump --schema-only --table='"public"."city"' "$SUBSCRIBER_SOURCE_DSN" | psql "$SUBSCRIBER_TARGET_DSN\""""
NO_PUBLISHER = """\
ERROR:  subscription "cities" could not connect to the publisher: connection to server at "127.0.0.1", \
port {source_port} failed: FATAL:  """


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, and its error.

    Attributes:
        typed: a command of a shell, a statement for `subscriber exec`, or after >>> an expression of Python.
        shown: the whole error. Of wrong usage, without the lines above `Error:`.
        where: the part of the error that names the place: the option, the word, the server, the file or the object.
        next: the part of the error that says what to do. A command is run as it is.
        works: the correction. Empty: the same again.
        on: the server of a statement in `next`.
        before: statements that make the state in which it is a mistake: on source, target, or of the subscription.
    """

    typed: str
    shown: str
    where: str
    next: str
    works: str = ""
    on: str = "target"
    before: tuple[tuple[str, str], ...] = ()


USAGE = [
    Mistake(
        "subscriber statsu",
        "No such command 'statsu'. Did you mean 'status'?",
        where="'statsu'",
        next="'status'",
        works="subscriber status",
    ),
    Mistake(
        "env -u SUBSCRIBER_TARGET_DSN subscriber status",
        "Missing option '--target' (env var: 'SUBSCRIBER_TARGET_DSN')."
        " Such as: --target postgresql://user@host/database",
        where="'SUBSCRIBER_TARGET_DSN'",
        next="--target postgresql://",
        works="env -u SUBSCRIBER_TARGET_DSN subscriber status --target '{target}'",
    ),
    Mistake(
        "subscriber status --jsno",
        "No such option: --jsno (Possible options: --json)",
        where="--jsno",
        next="--json",
        works="subscriber status --json",
    ),
    Mistake(
        "subscriber check --source '{source}'",
        "Invalid value: give the NAME of a subscription, or --source and --publication",
        where="--source",
        next="--publication",
        works="subscriber check --source '{source}' --publication atlas",
    ),
    Mistake(
        "subscriber status --setting statsu_interval=5",
        'Invalid value for \'--setting\': unrecognized setting "statsu_interval". Perhaps you meant "status_interval".',
        where='"statsu_interval"',
        next='"status_interval"',
        works="subscriber status --setting status_interval=5",
    ),
    Mistake(
        "subscriber status --setting status_interval=5x",
        'Invalid value for \'--setting\': invalid value for setting "status_interval": "5x"; valid units are'
        " s, us, ms, min, h, d",
        where='"status_interval"',
        next="valid units are s",
        works="subscriber status --setting status_interval=5s",
    ),
    Mistake(
        "subscriber config check",
        "Invalid value for '--config': give it before the command, as in subscriber --config FILE config check, or set"
        " SUBSCRIBER_CONFIG",
        where="'--config'",
        next="subscriber --config FILE config check",
        works="subscriber --config shop.toml config check",
    ),
    Mistake(
        "subscriber run --http web",
        "Invalid value for '--http': 'web' is not [HOST:]PORT, such as 8080 or 0.0.0.0:8080",
        where="'--http'",
        next="such as 8080",
        works="subscriber run --http 0",
    ),
    Mistake(
        "subscriber run --log-format xml",
        "Invalid value for '--log-format': 'xml' is not one of 'rich', 'json', 'postgres'.",
        where="'--log-format'",
        next="'json'",
        works="subscriber run --log-format json",
    ),
    Mistake(
        "subscriber run --app shop",
        "Invalid value for '--app': \"shop\" is not of the form package.module:name",
        where="'--app'",
        next="package.module:name",
        works="subscriber run --app shop:app",
    ),
    Mistake(
        "subscriber run --app shpo:app",
        "Invalid value for '--app': there is no module \"shpo\" in {folder} or on sys.path. Run the command in its"
        " directory.",
        where="'--app'",
        next="Run the command in its directory.",
        works="subscriber run --app shop:app",
    ),
    Mistake(
        "subscriber archive --info --directory nowhere",
        'ERROR:  there is no change log in "nowhere"\n'
        "HINT:  Correct the directory. Or write a log there: subscriber archive --source DSN --publication NAME"
        " --directory nowhere",
        where='"nowhere"',
        next="subscriber archive --source DSN --publication NAME --directory nowhere",
        works="subscriber archive --source '{source}' --publication atlas --directory nowhere",
    ),
    Mistake(
        "subscriber repair cities --from-verify differences",
        'ERROR:  could not open file "differences": No such file or directory\n'
        "HINT:  Write it with: subscriber verify NAME --json > FILE",
        where='"differences"',
        next="subscriber verify NAME --json > FILE",
        works="subscriber status",  # test_repair.py repairs from a file
    ),
]

CONNECTION_STRINGS = [
    Mistake(
        "subscriber status --target mysql://app@db/shop",
        'ERROR:  URI scheme "mysql" is not supported\nHINT:  Use postgresql://… in place of it, or key=value pairs.',
        where='"mysql"',
        next="postgresql://",
        works="subscriber status --target '{target}'",
    ),
    Mistake(
        "subscriber status --target @shop.dsn",
        'ERROR:  could not open connection string file "shop.dsn": No such file or directory\n'
        "HINT:  Write it: (umask 077; echo 'postgresql://user@host/database' > shop.dsn)",
        where='"shop.dsn"',
        next="(umask 077; echo 'postgresql://user@host/database' > shop.dsn)",
    ),
    Mistake(
        "subscriber status --target @open.dsn",
        'ERROR:  connection string file "open.dsn" has group or world access\n'
        "DETAIL:  Permissions should be u=rw (0600) or less.\nHINT:  chmod 600 open.dsn",
        where='"open.dsn"',
        next="chmod 600 open.dsn",
    ),
    Mistake(
        "subscriber status --target hots=127.0.0.1",
        'ERROR:  invalid connection option "hots"\nHINT:  Perhaps you meant "host".',
        where='"hots"',
        next='"host"',
        works="subscriber status --target '{pairs}'",
    ),
    Mistake(
        "subscriber status --target 'postgresql://127.0.0.1/shop?sslmod=require'",
        'ERROR:  invalid URI query parameter: "sslmod"\nHINT:  Perhaps you meant "sslmode".',
        where='"sslmod"',
        next='"sslmode"',
        works="subscriber status --target '{uri}?sslmode=disable'",
    ),
    Mistake(
        "subscriber status --target '{pairs} sslmode=prefered'",
        'ERROR:  invalid sslmode value: "prefered"\nHINT:  Perhaps you meant "prefer".',
        where="sslmode",
        next='"prefer"',
        works="subscriber status --target '{pairs} sslmode=prefer'",
    ),
    Mistake(
        "subscriber status --target 'host=127.0.0.1 port=5432x'",
        'ERROR:  invalid integer value "5432x" for connection option "port"\nHINT:  Write port as a number.',
        where='"port"',
        next="Write port as a number.",
        works="subscriber status --target '{pairs}'",
    ),
    Mistake(
        "subscriber status --target 'postgresql://postgres:p@ss@127.0.0.1/shop'",
        'ERROR:  invalid host or port in URI: "postgresql://postgres:********@127.0.0.1/shop"\n'
        'HINT:  Percent-encode the special characters of a password: "@" as %40, ":" as %3A, "/" as %2F.',
        where="host or port in URI",
        next='"@" as %40',
        works="subscriber status --target 'postgresql://postgres:p%40ss@127.0.0.1:{port}/{database}'",
    ),
    Mistake(
        "subscriber status --target '{uri}?connect_timeout=5 sslmode=disable'",
        'ERROR:  extra key/value separator "=" in URI query parameter: "connect_timeout"\n'
        'HINT:  Separate the parameters of a URI by "&": ?keyword=value&keyword=value.',
        where='"connect_timeout"',
        next="?keyword=value&keyword=value",
        works="subscriber status --target '{uri}?connect_timeout=5&sslmode=disable'",
    ),
    Mistake(
        "subscriber status --target postgresql://127.0.0.1:1/shop",
        'ERROR:  connection to server at "127.0.0.1", port 1 failed: Connection refused\n'
        "HINT:  Is the server running on that host and accepting TCP/IP connections?",
        where='"127.0.0.1", port 1',
        next="Is the server running on that host",
        works="subscriber status --target '{target}'",
    ),
    Mistake(
        "subscriber status --target host=no-host.invalid",
        'ERROR:  could not translate host name "no-host.invalid" to address: Name or service not known\n'
        "HINT:  Correct host in the connection string. Try it: getent hosts no-host.invalid",
        where='"no-host.invalid"',
        next="Correct host in the connection string.",
        works="subscriber status --target '{pairs}'",
    ),
    Mistake(
        "subscriber status --target service=shop",
        'ERROR:  definition of service "shop" not found\n'
        "HINT:  Write a section [shop] with lines keyword=value to {folder}/.pg_service.conf.",
        where='"shop"',
        next="Write a section [shop]",
        works="subscriber status --target service=atlas",
    ),
    Mistake(
        "subscriber status --target '{pairs} dbname=shop'",
        'ERROR:  database "shop" does not exist\nDETAIL:  The server is at "127.0.0.1", port {port}.\n'
        'HINT:  Correct dbname. Or on that server: CREATE DATABASE "shop";',
        where='"127.0.0.1", port {port}',
        next='CREATE DATABASE "shop";',
    ),
]

STATEMENTS = [
    Mistake(
        "SELECT 1",
        "ERROR:  only CREATE, ALTER and DROP SUBSCRIPTION can be executed here\nHINT:  Use psql for other statements.",
        where="here",
        next="Use psql",
        works='psql "$SUBSCRIBER_TARGET_DSN" -qc "SELECT 1" -o /dev/null',
    ),
    Mistake(
        "CREATE SUBSCRIPTON cities CONNECTION '{source}' PUBLICATION atlas",
        'ERROR:  syntax error at or near "SUBSCRIPTON"\n'
        "LINE 1: CREATE SUBSCRIPTON cities CONNECTION 'user=postgres host=127...\n"
        '               ^\nHINT:  Perhaps you meant "SUBSCRIPTION".',
        where='"SUBSCRIPTON"',
        next='"SUBSCRIPTION"',
        works="DROP SUBSCRIPTION IF EXISTS cities",
    ),
    Mistake(
        "CREATE SUBSCRIPTION cities",
        "ERROR:  syntax error at end of input\nLINE 1: CREATE SUBSCRIPTION cities\n"
        "                                  ^\nHINT:  The next word is CONNECTION or SERVER.",
        where="end of input",
        next="The next word is CONNECTION",
        works=f"{CREATE}; DROP SUBSCRIPTION cities",
    ),
    Mistake(
        f"{CREATE} WITH (copy_dta = off)",
        'ERROR:  unrecognized subscription parameter: "copy_dta"\nHINT:  Perhaps you meant "copy_data".',
        where='"copy_dta"',
        next='"copy_data"',
        works=f"{CREATE} WITH (copy_data = off); DROP SUBSCRIPTION cities",
    ),
    Mistake(
        f"{CREATE} WITH (streaming = onn)",
        'ERROR:  streaming requires a Boolean value or "parallel"\nHINT:  Valid are: on, off, parallel.',
        where="streaming",
        next="on, off, parallel",
        works=f"{CREATE} WITH (streaming = on); DROP SUBSCRIPTION cities",
    ),
    Mistake(
        f"{CREATE} WITH (conflict_policy = 'keep_locl')",
        'ERROR:  invalid value for parameter "conflict_policy": "keep_locl"\n'
        'DETAIL:  There is no policy "keep_locl".\n'
        "HINT:  Write [schema.table] [conflict_type]: policy, separated by commas; policies are"
        ' "default", "error", "skip", "apply_remote", "keep_local", "last_update_wins" and "call" with the name of a'
        " function. For numeric columns, write schema.table(column, ...): add_delta.",
        where='"conflict_policy"',
        next='"keep_local"',
        works=f"{CREATE} WITH (conflict_policy = 'keep_local'); DROP SUBSCRIPTION cities",
    ),
    Mistake(
        "CREATE SUBSCRIPTION cities CONNECTION '{source} dbname=atlas' PUBLICATION atlas",
        f'{NO_PUBLISHER}database "atlas" does not exist\n'
        'HINT:  Correct dbname. Or on that server: CREATE DATABASE "atlas";',
        where="port {source_port}",
        next='CREATE DATABASE "atlas";',
        on="source",
        works="CREATE SUBSCRIPTION cities CONNECTION '{source} dbname=atlas' PUBLICATION atlas;"
        " DROP SUBSCRIPTION cities",
    ),
    Mistake(
        READER,
        f'{NO_PUBLISHER}role "reader" is not permitted to log in\n'
        'HINT:  On that server: ALTER ROLE "reader" WITH LOGIN;',
        where="port {source_port}",
        next='ALTER ROLE "reader" WITH LOGIN;',
        on="source",
        works="subscriber check --source '{source} user=reader' --publication atlas",
        before=(("source", "CREATE ROLE reader NOLOGIN"),),
    ),
    Mistake(
        READER,
        f"{NO_PUBLISHER}permission denied to start WAL sender\n"
        'HINT:  On that server, as a superuser: ALTER ROLE "reader" WITH REPLICATION;',
        where='subscription "cities" could not connect to the publisher',
        next='ALTER ROLE "reader" WITH REPLICATION;',
        on="source",
        works=f"{READER}; DROP SUBSCRIPTION cities",
    ),
    Mistake(
        "CREATE SUBSCRIPTION cities CONNECTION '{source}' PUBLICATION atlsa",
        'WARNING:  publication "atlsa" does not exist on the publisher\nHINT:  Perhaps you meant "atlas".\n'
        'NOTICE:  created replication slot "cities" on publisher',
        where='"atlsa" does not exist on the publisher',
        next='"atlas"',
        works="ALTER SUBSCRIPTION cities SET PUBLICATION atlas; DROP SUBSCRIPTION cities",
    ),
    Mistake(
        CREATE,
        'ERROR:  relation "public.city" does not exist\n'
        f"HINT:  The table is published. On the target it is missing; to create it there: {DUMP}",
        where="On the target it is missing",
        next=DUMP,
        works=f"{CREATE}; DROP SUBSCRIPTION cities",
        before=(("target", "DROP TABLE city"),),
    ),
    Mistake(
        CREATE,
        'ERROR:  could not create replication slot "cities": ERROR:  replication slot "cities" already exists\n'
        "HINT:  Use another name WITH (slot_name = …), or that slot WITH (create_slot = false). If no subscriber needs"
        " it, on the publisher: SELECT pg_drop_replication_slot('cities');",
        where='replication slot "cities"',
        next="SELECT pg_drop_replication_slot('cities');",
        on="source",
        before=(("source", "SELECT pg_create_logical_replication_slot('cities', 'pgoutput')"),),
    ),
]

SUBSCRIPTION = [
    Mistake(
        CREATE,
        'ERROR:  subscription "cities" already exists\n'
        'HINT:  Use another name, or change it with ALTER SUBSCRIPTION "cities".',
        where='"cities"',
        next='ALTER SUBSCRIPTION "cities"',
        works="ALTER SUBSCRIPTION cities CONNECTION '{source}'",
    ),
    Mistake(
        "ALTER SUBSCRIPTION citeis DISABLE",
        'ERROR:  subscription "citeis" does not exist\nHINT:  Perhaps you meant "cities".',
        where='"citeis"',
        next='"cities"',
        works="ALTER SUBSCRIPTION cities DISABLE",
    ),
    Mistake(
        "ALTER SUBSCRIPTION cities REFRESH PUBLICATION",
        "ERROR:  ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions\n"
        'HINT:  Enable it first: ALTER SUBSCRIPTION "cities" ENABLE;',
        where="disabled subscriptions",
        next='ALTER SUBSCRIPTION "cities" ENABLE;',
    ),
    Mistake(
        "ALTER SUBSCRIPTION cities SET (two_phase = on)",
        'ERROR:  cannot set option "two_phase" for enabled subscription\n'
        'HINT:  Disable it first: ALTER SUBSCRIPTION "cities" DISABLE;',
        where='"two_phase"',
        next='ALTER SUBSCRIPTION "cities" DISABLE;',
    ),
    Mistake(
        "ALTER SUBSCRIPTION cities SET (slot_name = NONE)",
        "ERROR:  cannot set slot_name = NONE for enabled subscription\n"
        'HINT:  Disable it first: ALTER SUBSCRIPTION "cities" DISABLE;',
        where="slot_name",
        next='ALTER SUBSCRIPTION "cities" DISABLE;',
        works="ALTER SUBSCRIPTION cities SET (slot_name = NONE); ALTER SUBSCRIPTION cities SET (slot_name = 'cities')",
        before=(("subscription", "ALTER SUBSCRIPTION cities ENABLE"),),
    ),
    Mistake(
        "ALTER SUBSCRIPTION cities SET (enabled = on)",
        'ERROR:  unrecognized subscription parameter: "enabled"\nHINT:  Use ALTER SUBSCRIPTION … ENABLE or DISABLE.',
        where='"enabled"',
        next="ALTER SUBSCRIPTION … ENABLE",
        works="ALTER SUBSCRIPTION cities ENABLE",
    ),
    Mistake(
        "ALTER SUBSCRIPTION cities SKIP (lsn = 'abc')",
        'ERROR:  invalid input syntax for type pg_lsn: "abc"\n'
        "HINT:  An LSN has the form 16/B374D848. subscriber status shows the one to skip.",
        where='"abc"',
        next="subscriber status",
        works="ALTER SUBSCRIPTION cities SKIP (lsn = '16/B374D848'); ALTER SUBSCRIPTION cities SKIP (lsn = NONE)",
    ),
    Mistake(
        "subscriber quarantine show cities abc",
        'ERROR:  invalid input syntax for type pg_lsn: "abc"\n'
        "HINT:  An LSN has the form 16/B374D848. List those in quarantine: subscriber quarantine list cities",
        where='"abc"',
        next="subscriber quarantine list cities",
        works="subscriber quarantine list cities",
    ),
    Mistake(
        "subscriber quarantine show cities 16/B374D848",
        'ERROR:  transaction 16/B374D848 of subscription "cities" is not in quarantine\n'
        "HINT:  List those that are: subscriber quarantine list cities",
        where='transaction 16/B374D848 of subscription "cities"',
        next="subscriber quarantine list cities",
        works="subscriber quarantine list cities",
    ),
    Mistake(
        "subscriber resync cities ctiy",
        'ERROR:  table "ctiy" is not part of subscription "cities"\nHINT:  Perhaps you meant "city".',
        where='"ctiy"',
        next='"city"',
        works="subscriber resync cities city --no-wait",
    ),
    Mistake(
        "subscriber verify cities",
        'ERROR:  no launcher runs subscription "cities"\nHINT:  Start one: subscriber run',
        where='"cities"',
        next="subscriber run",
        works=">>> db.wait_for_sync('cities', timeout=60)",
    ),
]

PROGRAM = [
    Mistake(
        ">>> opened(subscriber.stream(source, publications='atlas'))",
        "publications is a sequence of names: publications=['atlas']",
        where="publications",
        next="publications=['atlas']",
        works=">>> opened(subscriber.stream(source, publications=['atlas']))",
    ),
    Mistake(
        ">>> opened(subscriber.stream(source, publications=['atlas'], create='mising'))",
        "create is 'mising', and must be one of 'never', 'missing', 'replace'",
        where="create",
        next="'missing'",
        works=">>> opened(subscriber.stream(source, publications=['atlas'], slot='new', create='missing'))",
    ),
    Mistake(
        ">>> opened(subscriber.stream(source, publications=['atlas'], slot='mine', create='never'))",
        'replication slot "mine" does not exist on the publisher\n'
        'HINT:  Give create="missing" to have it made, or create it there:'
        " SELECT pg_create_logical_replication_slot('mine', 'pgoutput');",
        where="on the publisher",
        next="SELECT pg_create_logical_replication_slot('mine', 'pgoutput');",
        on="source",
    ),
    Mistake(
        ">>> opened(subscriber.stream(source, publications=['zoo']))",
        'publication "zoo" does not exist on the publisher\n'
        'HINT:  The publisher has: "atlas". Or on the publisher: CREATE PUBLICATION "zoo" FOR ALL TABLES;',
        where="on the publisher",
        next='CREATE PUBLICATION "zoo" FOR ALL TABLES;',
        on="source",
    ),
    Mistake(
        ">>> db.create_subscription('ports', source=source, publications=['atlas'], streming='on')",
        'unrecognized subscription parameter: "streming"\nHINT:  Perhaps you meant "streaming".',
        where='"streming"',
        next='"streaming"',
        works=">>> db.create_subscription('ports', source=source, publications=['atlas'], streaming='on')",
    ),
    Mistake(
        ">>> db.wait_for_sync('ports', timeout=0.1)",
        'subscription "ports" is not in sync after 0.1 s: table public.city is waiting; no launcher is running\n'
        "HINT:  Start one: subscriber run\nOr run it here: async with db.running().",
        where="table public.city",
        next="subscriber run",
        works=">>> db.wait_for_sync('ports', timeout=60)",
    ),
    Mistake(
        ">>> db.status('potrs')",
        'subscription "potrs" does not exist\nHINT:  Perhaps you meant "ports".',
        where='"potrs"',
        next='"ports"',
        works=">>> db.status('ports')",
    ),
    Mistake(
        "subscriber uninstall",
        'ERROR:  cannot remove schema "subscriber" because subscriptions exist\nDETAIL:  They are: cities, ports.\n'
        "HINT:  Remove them and their slots as well: subscriber uninstall --drop-subscriptions",
        where='schema "subscriber"',
        next="subscriber uninstall --drop-subscriptions",
        works="subscriber status",
    ),
]

MISTAKES = [*USAGE, *CONNECTION_STRINGS, *STATEMENTS, *SUBSCRIPTION, *PROGRAM]
