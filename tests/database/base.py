# SPDX-License-Identifier: Apache-2.0

import atexit
import functools
import os
import signal

from cinder.db import api as db
from cinder.db import migration
from cinder.tests.unit import test
import fixtures
from pifpaf.drivers import mysql
import sqlalchemy as sa


@functools.cache
def connection():
    """The URL of a database with Cinder's tables, of this process alone."""
    server = mysql.MySQLDriver()
    server.setUp()
    atexit.register(server.cleanUp)

    def end(number, _frame):
        server.cleanUp()
        os._exit(128 + number)
    # It has a session of its own, and would outlive us.
    signal.signal(signal.SIGTERM, end)
    return server.url.replace('mysql', 'mysql+pymysql', 1)


@functools.cache
def first_contents():
    """Cinder's tables, and what is in them at first."""
    migration.db_sync()
    found = sa.MetaData()
    found.reflect(db.get_engine())
    with db.get_engine().connect() as session:
        return {table: [row._asdict() for row in session.execute(
            table.select())] for table in found.sorted_tables}


class Database(fixtures.Fixture):
    """Stands in for Cinder's own fixture, which has SQLite."""

    def _setUp(self):
        test.CONF.set_override('connection', connection(), 'database')
        self.addCleanup(test.CONF.clear_override, 'connection', 'database')
        tables = first_contents()
        with db.get_engine().begin() as session:
            for table in reversed(tables):
                session.execute(table.delete())
            for table, rows in tables.items():
                if rows:
                    session.execute(table.insert(), rows)


class OnMariaDB:
    """Lets a test of Cinder's kind have MariaDB."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # What is begun within a test is in a folder that goes with it.
        connection()

    def setUp(self):
        self.useFixture(fixtures.MockPatchObject(test, 'Database', Database))
        super().setUp()

    def share_database(self):
        """Each thread has a connection of its own."""
