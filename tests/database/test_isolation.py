# SPDX-License-Identifier: Apache-2.0
"""Of two transactions at once one comes first, whatever MariaDB lets happen.

Each is stopped before each of its statements, and before its commit, while the
other one runs.  What is in the database then, and what both were told, must be
what comes of them one after the other, in either order.  Nothing is known here
of what they do.
"""

import itertools
import os
import threading

from cinder.db import api as db
from cinder.db import models
from cinder import objects
from cinder.tests.unit import utils as cinder_test_utils
import ddt
import fixtures
import sqlalchemy as sa

from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.database import base
from tests.unit import base as unit
from tests.unit import test_rows

# Seconds for one that is not held up, after which it counts as waiting
SOON = 0.1
PATIENCE = 60
# What says when
VARIES = ('created_at', 'updated_at', 'deleted_at', 'attach_time', 'ec2_id')
TABLES = (models.VolumeAdminMetadata, models.VolumeAttachment, models.Volume)
# In this order: those of a volume and of its moves begin alike.
VOLUME, MOVE, NEXT, REVERTED, COPY, KEPT = (
    first + '-%04d-4000-8000-000000000000' % number
    for first in ('aaaaaaaa', 'bbbbbbbb') for number in range(3))


class Scene:
    """A volume that has come by a move, and one that is being reverted."""

    def __init__(self, test):
        self.ctxt, self.heir, self.begin = test.ctxt, test.heir, test.begin
        with db.main_context_manager.writer.using(self.ctxt) as session:
            for model in TABLES:
                session.query(model).delete()
        volume = test.make_volume(id=VOLUME, attach_status='attached')
        self.attachment_id = cinder_test_utils.attach_volume(
            test.ctxt, VOLUME, None, 'node', '/dev/vdb').id
        self.move = rows.change_state(
            test.ctxt, test.begin(volume, move_id=MOVE),
            table.State.STARTING.value, swap=True)
        reverted = test.make_volume(host=unit.B, id=REVERTED)
        self.copy = test.begin(reverted, move_id=COPY, is_copy=True,
                               source_name='_snapshot', generation=1,
                               replaced=reverted.name)
        self._volume = objects.Volume.get_by_id(test.ctxt, VOLUME)

    @property
    def volume(self):
        """As somebody has read it before."""
        return self._volume.obj_clone()

    def everything(self):
        """All that is in the rows, but when."""
        with db.main_context_manager.reader.using(self.ctxt) as session:
            return sorted(
                (model.__tablename__, *(
                    (column, str(value)) for column, value in row.items()
                    if column not in VARIES and value is not None
                    and row.get('key') != rows.SINCE
                    and (column != 'id' or model is models.Volume)))
                for model in TABLES
                for row in session.execute(
                    model.__table__.select()).mappings())


def complete(scene):
    rows.change_state(scene.ctxt, scene.move, 'completing')


def abort(scene):
    rows.change_state(scene.ctxt, scene.move, 'aborting', swap=True)


def come_back(scene):
    rows.come_back(scene.ctxt, scene.move, 'returning', ())


def record_done(scene):
    rows.record_done(scene.ctxt, scene.move, ('seal_source',))


def forget(scene):
    rows.forget(scene.ctxt, scene.move)


def hand_over(scene):
    rows.hand_over(scene.ctxt, [scene.move], REVERTED)


def give(scene):
    rows.change_state(scene.ctxt, scene.copy, 'migrating', begins=True)


def give_up(scene):
    rows.give_up_volume(scene.ctxt, VOLUME, unit.B, scene.heir)


# Cinder's own

def destroy(scene):
    db.volume_destroy(scene.ctxt, VOLUME)


def destroy_reverted(scene):
    db.volume_destroy(scene.ctxt, REVERTED)


def connecting(attachment_id):
    return {'id': attachment_id, 'instance_uuid': attachment_id}


def begin(scene):
    scene.begin(scene.volume, move_id=NEXT, generation=3,
                connecting=[connecting('11111111')])


def record_problem(scene):
    rows.record_problem(scene.ctxt, scene.move, 'broken')


def note_connecting(scene):
    rows.note_connecting(scene.ctxt, VOLUME, [connecting('22222222')])


def note_none_connecting(scene):
    rows.note_connecting(scene.ctxt, VOLUME, [])


def note_revert(scene):
    rows.note_revert(scene.ctxt, REVERTED, COPY)


def note_migration(scene):
    rows.note_migration(scene.ctxt, VOLUME, unit.B)


def record_export(scene):
    rows.record_export(scene.ctxt, VOLUME,
                       {'provider_location': 'here', 'provider_auth': 'x'})


def save(scene):
    volume = scene.volume
    volume.status = 'detaching'
    volume.save()


def begin_to_extend(scene):
    scene.volume.conditional_update({'status': 'extending'},
                                    {'status': ('available', 'in-use')})


def detached(scene):
    db.volume_detached(scene.ctxt, VOLUME, scene.attachment_id)


# What decides where a volume is; everything else in the soak
DECISIONS = (complete, abort, come_back, record_done, forget, hand_over, give,
             give_up, destroy, destroy_reverted)
OTHERS = (begin, record_problem, note_connecting, note_none_connecting,
          note_revert, note_migration, record_export, save, begin_to_extend,
          detached)
PLAYED = DECISIONS + (
    OTHERS if os.environ.get('LOCALSTOR_SOAK_TRANSACTIONS') else ())


class Party(threading.Thread):
    """Acts in a scene, as somebody on another node."""

    def __init__(self, act, scene, stop=None):
        """:param stop: the number of the statement that it stops before"""
        super().__init__(daemon=True)
        self.answer = None
        self.stopped = threading.Event()
        self.go_on = threading.Event()
        self._act, self._scene = act, scene
        self._left = stop

    def run(self):
        try:
            self._act(self._scene)
            self.answer = 'done'
        except Exception as error:
            self.answer = type(error).__name__
        self.stopped.set()

    def statement(self):
        """It is about to ask the database for something."""
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                self.stopped.set()
                self.go_on.wait(PATIENCE)


@ddt.ddt
class IsolationTest(base.OnMariaDB, test_rows.RowsTestCase):

    def setUp(self):
        super().setUp()
        self.heir = self.make_service(unit.C)
        self.useFixture(fixtures.MockPatchObject(rows, 'new_move_id',
                                                 return_value=KEPT))
        for event in ('before_cursor_execute', 'commit'):
            sa.event.listen(db.get_engine(), event, self._pass)
            self.addCleanup(sa.event.remove, db.get_engine(), event,
                            self._pass)

    @staticmethod
    def _pass(*_arguments):
        party = threading.current_thread()
        if isinstance(party, Party):
            party.statement()

    def one_after_the_other(self, first, second):
        scene = Scene(self)
        answers = []
        for act in (first, second):
            party = Party(act, scene)
            party.run()
            answers.append(party.answer)
        return answers, scene.everything()

    def at_once(self, first, second, stop):
        """What comes of it if the second runs in the middle of the first;
        None if the first has ended before.
        """
        scene = Scene(self)
        one, other = Party(first, scene, stop), Party(second, scene)
        one.start()
        self.assertTrue(one.stopped.wait(PATIENCE))
        if one.answer:
            return None
        other.start()
        other.join(SOON)
        one.go_on.set()
        for party in (one, other):
            party.join(PATIENCE)
            self.assertFalse(party.is_alive())
        return [one.answer, other.answer], scene.everything()

    @ddt.data(*PLAYED)
    def test_one_comes_first(self, first):
        for second in PLAYED:
            answers, after = self.one_after_the_other(second, first)
            wanted = [self.one_after_the_other(first, second),
                      (answers[::-1], after)]
            for stop in itertools.count():
                came = self.at_once(first, second, stop)
                if came is None:
                    break
                self.assertIn(came, wanted, '%s stopped before statement %d '
                              'for %s' % (first.__name__, stop,
                                          second.__name__))
            # Before a statement and before the commit, at least
            self.assertGreaterEqual(stop, 2)
