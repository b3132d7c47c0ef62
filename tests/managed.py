"""Servers as managed services give them: the superuser is out of reach, and an administrator has fewer rights.

Each service is the roles, memberships and grants that its documentation and its users report, made on a server of the
community's. Not emulated: replication by membership (RDS), extensions that give further rights (supautils,
aiven_extras), restrictions of a service's own code, tokens and poolers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS, Database

PASSWORD = "managed"
_ADMINISTRATOR = "LOGIN CREATEDB CREATEROLE"


@dataclass(frozen=True)
class Service:
    """A managed service.

    Attributes:
        name: of the service.
        superuser: the service's own role, with which no customer connects.
        administrator: the customer's role.
        roles: statements of the superuser in database postgres.
        database: statements of the superuser in each database of the customer.
        sets_replica_role: the administrator may set session_replication_role.
        creates_roles: the administrator may create roles.
        hides_subscriptions: only the service reads pg_subscription.
    """

    name: str
    superuser: str
    administrator: str
    roles: tuple[str, ...]
    database: tuple[str, ...] = ()
    sets_replica_role: bool = False
    creates_roles: bool = True
    hides_subscriptions: bool = False

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", self.name.lower())


SERVICES = {
    str(service): service
    for service in (
        Service(
            "RDS",
            "rdsadmin",
            "postgres",
            (
                *(
                    f"CREATE ROLE rds_{name}"
                    for name in ("superuser", "replication", "password", "iam", "ad", "extension", "reserved")
                ),
                "GRANT pg_monitor, pg_signal_backend, pg_create_subscription TO rds_superuser",
                "GRANT rds_replication, rds_password TO rds_superuser WITH ADMIN OPTION",
                "GRANT SET ON PARAMETER session_replication_role TO rds_superuser",
                # rds_replication gives replication there, and the attribute is what a server of the community has.
                f"CREATE ROLE postgres {_ADMINISTRATOR} REPLICATION IN ROLE rds_superuser",
                "CREATE DATABASE rdsadmin",
                "REVOKE ALL ON DATABASE rdsadmin FROM PUBLIC",
            ),
            sets_replica_role=True,
        ),
        Service(
            "Cloud SQL",
            "cloudsqladmin",
            "postgres",
            (
                f"CREATE ROLE cloudsqlsuperuser {_ADMINISTRATOR}",
                "CREATE ROLE cloudsqlagent",
                "CREATE ROLE cloudsqlreplica REPLICATION",
                "GRANT pg_monitor, pg_create_subscription TO cloudsqlsuperuser",
                f"CREATE ROLE postgres {_ADMINISTRATOR} REPLICATION IN ROLE cloudsqlsuperuser",
            ),
        ),
        Service(
            "Azure",
            "azuresu",
            "adm",
            (
                "CREATE ROLE azure_pg_admin",
                "GRANT pg_create_subscription, pg_monitor, pg_signal_backend TO azure_pg_admin",
                "GRANT SET ON PARAMETER session_replication_role TO azure_pg_admin",
                f"CREATE ROLE adm {_ADMINISTRATOR} REPLICATION BYPASSRLS IN ROLE azure_pg_admin",
                "CREATE DATABASE azure_maintenance",
                "CREATE DATABASE azure_sys",
                "REVOKE ALL ON DATABASE azure_maintenance, azure_sys FROM PUBLIC",
            ),
            (
                "ALTER SCHEMA public OWNER TO azure_pg_admin",
                "REVOKE ALL ON pg_subscription FROM PUBLIC",
                "REVOKE ALL ON pg_replication_origin_status FROM PUBLIC",
            ),
            sets_replica_role=True,
            hides_subscriptions=True,
        ),
        Service(
            "Supabase",
            "supabase_admin",
            "postgres",
            (
                "CREATE ROLE anon",
                "CREATE ROLE authenticated",
                "CREATE ROLE service_role BYPASSRLS",
                "CREATE ROLE supabase_auth_admin LOGIN CREATEROLE",
                "CREATE ROLE authenticator LOGIN NOINHERIT IN ROLE anon, authenticated, service_role",
                f"CREATE ROLE postgres {_ADMINISTRATOR} REPLICATION BYPASSRLS"
                " IN ROLE pg_monitor, pg_read_all_data, pg_signal_backend",
                "GRANT anon, authenticated, service_role, pg_create_subscription TO postgres WITH ADMIN OPTION",
                "GRANT SET ON PARAMETER session_replication_role TO postgres",
            ),
            (
                "CREATE SCHEMA auth AUTHORIZATION supabase_auth_admin",
                "CREATE TABLE auth.users (id uuid PRIMARY KEY, email text)",
                "ALTER TABLE auth.users OWNER TO supabase_auth_admin",
                "CREATE SCHEMA storage",
                "CREATE PUBLICATION supabase_realtime",
            ),
            sets_replica_role=True,
        ),
        Service(
            "Neon",
            "cloud_admin",
            "neondb_owner",
            (
                "CREATE ROLE neon_superuser CREATEDB CREATEROLE REPLICATION BYPASSRLS"
                " IN ROLE pg_read_all_data, pg_write_all_data, pg_create_subscription",
                "GRANT pg_monitor, pg_signal_backend TO neon_superuser WITH ADMIN OPTION",
                f"CREATE ROLE neondb_owner {_ADMINISTRATOR} REPLICATION BYPASSRLS IN ROLE neon_superuser",
            ),
            ("GRANT EXECUTE ON FUNCTION pg_show_replication_origin_status TO neon_superuser",),
        ),
        Service(
            "Aiven",
            "postgres",
            "avnadmin",
            (
                f"CREATE ROLE avnadmin {_ADMINISTRATOR} REPLICATION",
                "CREATE DATABASE _aiven",
                "REVOKE ALL ON DATABASE _aiven FROM PUBLIC",
            ),
        ),
        Service(
            "CloudNativePG",
            "postgres",
            "app",  # enableSuperuserAccess is off
            (
                "CREATE ROLE streaming_replica LOGIN REPLICATION",
                "CREATE ROLE cnpg_pooler_pgbouncer LOGIN",
                "CREATE ROLE app LOGIN",
            ),
            creates_roles=False,
        ),
    )
}


@dataclass(frozen=True)
class ManagedServer:
    """A server of a managed service."""

    service: Service
    server: Server

    async def create_database(self, name: str) -> Database:
        """Create a database of the customer, and what the service puts into it. Its statements are the superuser's."""
        await self.as_superuser("postgres").execute(f"CREATE DATABASE {name} OWNER {self.service.administrator}")
        database = self.as_superuser(name)
        await database.execute(*self.service.database)
        return database

    def as_superuser(self, database: str) -> Database:
        """Return a database whose statements are those of the service itself."""
        return _OfSuperuser(self.server, database, superuser=self.service.superuser)

    def dsn(self, database: str) -> str:
        """Return the connection string of the customer."""
        return self.server.dsn(database, user=self.service.administrator, password=PASSWORD)


@dataclass
class _OfSuperuser(Database):
    superuser: str = "postgres"

    def dsn(self, **parameters: str) -> str:
        return super().dsn(**{"user": self.superuser, **parameters})


async def start_service(servers: Servers, service: Service, name: str, programs: Path | None) -> ManagedServer:
    """Start a server of a service. Its administrator needs a password, and other roles need none."""
    server = await servers.create(name, SETTINGS, bin=programs, initdb=(f"--username={service.superuser}",))
    hba = server.data / "pg_hba.conf"
    hba.write_text(f"host all {service.administrator} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    await server.start(password_encryption="scram-sha-256")
    managed = ManagedServer(service, server)
    with_password = f"ALTER ROLE {service.administrator} PASSWORD '{PASSWORD}'"
    await managed.as_superuser("postgres").execute(*service.roles, with_password)
    return managed
