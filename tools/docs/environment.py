"""docs/reference/environment.md: the environment variables that are read, ours and libpq's."""

from __future__ import annotations

import re

from subscriber.connection.defaults import variable
from subscriber.redaction import KEYWORDS
from tools.docs import markdown, source
from tools.docs.markdown import code

OURS = {
    "SUBSCRIBER_TARGET_DSN": "the target database, if `--target` is not given; a DSN or `@FILE`",
    "SUBSCRIBER_SOURCE_DSN": "the publisher's database, if `--source` is not given; a DSN or `@FILE`",
    "SUBSCRIBER_APPLY_DSN": "the target database for the role that applies changes, if `--apply-target` is not given; a "
    "DSN or `@FILE`",
    "SUBSCRIBER_CONFIG": "the [configuration file](../configuration.md), if `--config` is not given",
    "SUBSCRIBER_HTTP_TOKEN": "lines of `LABEL:TOKEN`, if `--http-token-file` is not given: the persons who may act on the "
    "[console](../console.md#actions)",
    "SUBSCRIBER_HTTP_TOKEN_FILE": "the file of `--http-token-file`",
    "SUBSCRIBER_PASSWORD_COMMAND": "a shell command that prints the password of a connection without one; see below",
    "SUBSCRIBER_SPARK_CLASSES": "the directory of the file that [`subscriber prepare-spark`](../spark.md#faster-starts) makes; "
    "if empty, the file is not used",
    "SUBSCRIBER_PURE": "if not empty: the Python functions are used instead of the compiled ones",
}
OTHERS = {
    "TMPDIR": "the folder for temporary files, including Spark's, and for streamed transactions without another folder",
    "XDG_CACHE_HOME": "the folder of `subscriber/spark`, where `subscriber prepare-spark` makes its file; otherwise `~/.cache`",
    "HOME": "the folder of `~/.pgpass`, `~/.pg_service.conf` and `~/.postgresql`",
    "NO_COLOR": "if not empty: output on a terminal has no colors, see [no-color.org](https://no-color.org)",
    "JAVA_HOME": "the Java runtime for Spark; takes precedence over `PATH` and the wheel",
    "PGSERVICEFILE": "the file with services, instead of `~/.pg_service.conf`",
    "PGSYSCONFDIR": "the folder of the system's `pg_service.conf`",
}

HEAD = """
A `.env` file is not read. Each [setting](settings.md) also has a variable: `SUBSCRIBER_SPOOL_DIR` is setting `spool_dir`, and so
on. Variables that are neither listed on this page nor settings have no effect.
""".strip()

PASSWORDS = """
Keep the password of `--target`, `--apply-target` and `--source` where no other user of the machine can read it:

| place | how | who can read it |
|---|---|---|
| a file with the DSN | `--target @/run/secrets/target`, or `SUBSCRIBER_TARGET_DSN=@/run/secrets/target` | its owner: a file with group or world access is refused |
| a [configuration file](../configuration.md) | `password = "$SHOP_PASSWORD"` or `"@/run/secrets/shop"` of a target | as of variables and files; a file that has passwords itself is refused with group or world access |
| a password file | `passfile=…`, `PGPASSFILE` or `~/.pgpass`, as for libpq | its owner: a file with group or world access is not used |
| a service file | `service=shop` with `PGSERVICEFILE` or `~/.pg_service.conf`, as for libpq | all users that the file's permissions allow |
| the environment | `SUBSCRIBER_TARGET_DSN`, `PGPASSWORD` | the same user and root |
| an argument | `--target postgresql://app:secret@…` | every user, while Python starts |

`@FILE` takes the first line of the file. Arguments are overwritten on Linux when a command starts: from then on `ps` and
`/proc/PID/cmdline` show `********` in place of a password. The start takes a fraction of a second. On other systems arguments are not
hidden. The processes that a command starts, such as Spark's, get no DSN as an argument.
""".strip()

COMMAND = """
For a password that expires, such as a token of a cloud's IAM, `SUBSCRIBER_PASSWORD_COMMAND` names a shell command. It runs for each
new connection, to the target and to publishers, if neither the connection string nor the password file has a password. `PGHOST`,
`PGPORT`, `PGUSER` and `PGDATABASE` describe the server. The first line of its output is the password:

```sh
export SUBSCRIBER_PASSWORD_COMMAND='aws rds generate-db-auth-token --hostname "$PGHOST" --port "$PGPORT" --username "$PGUSER"'
subscriber run --target 'host=db.example user=app dbname=shop sslmode=verify-full sslrootcert=rds.pem'
```

A command that fails, or runs longer than 30 s, counts as a server that cannot be reached: workers retry it. The subscription of a role
that is not a superuser needs a password in its connection string, so the command is not used for it. `pg_dump`, which `subscriber
migrate schema` starts, uses a password file instead. Spark's executors need the variable in their own environment.
""".strip()

LIBPQ = """
Keywords that a connection string omits are taken from libpq's variables, then from libpq's defaults. The variables apply to every
connection, to the target and to the publisher, so set only what both have in common. For the stored connection string of a
subscription, the environment of the launcher applies. Keywords without a variable: {without}.
""".strip()


def page() -> str:
    read = {name for _, text in source.modules() for name in re.findall(r'"(SUBSCRIBER_[A-Z_]+)"', text)}
    assert read == set(OURS), f"explain or remove: {read ^ set(OURS)}"
    names = {keyword: variable(keyword) for keyword in KEYWORDS}
    without = ", ".join(code(keyword) for keyword, name in names.items() if name is None)
    return markdown.page(
        "Environment",
        HEAD,
        "## Passwords",
        PASSWORDS,
        "## Variables of subscriber",
        markdown.table(["variable", ""], [[code(name), says] for name, says in OURS.items()]),
        COMMAND,
        "## Variables of other programs",
        markdown.table(["variable", ""], [[code(name), says] for name, says in OTHERS.items()]),
        "## Variables of libpq",
        LIBPQ.format(without=without),
        markdown.table(
            ["keyword", "variable"], [[code(keyword), code(name)] for keyword, name in names.items() if name]
        ),
    )
