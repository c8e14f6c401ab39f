# SPDX-License-Identifier: Apache-2.0

import dataclasses
from unittest import mock
import uuid

from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder import objects
from cinder.tests.unit import fake_constants as fake
from cinder.tests.unit import utils as cinder_test_utils
from cinder.volume import api as volume_api
import ddt
from oslo_db import exception as db_exception
import sqlalchemy as sa
from sqlalchemy import orm

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base
from tests.unit.datapath import test_transfer


INSTANCE = '11111111-1111-1111-1111-111111111111'


class RowsTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.service = self.make_service(base.B)
        self.volume = self.make_volume()

    def make_volume(self, host=base.A, **more):
        return cinder_test_utils.create_volume(
            self.ctxt, host=host + '#local', size=1, status='available',
            **more)

    def begin(self, volume=None, leaving=(), migrated_to='', connecting=None,
              **more):
        volume = volume or self.volume
        move_id = more.get('move_id', rows.new_move_id(volume.id))
        values = dict(
            move_id=move_id, volume_id=volume.id, generation=2,
            source_host=base.A, destination_host=base.B,
            source_name=volume.name,
            destination_name=rows.future_copy_name(move_id), size=1 << 30,
            block_size=512, engine='clone', region_sectors=128, threshold=16,
            batch=8, export=dataclasses.replace(test_transfer.EXPORT,
                                                serial=move_id))
        return rows.begin(self.ctxt, volume,
                          transfer.Transfer(**{**values, **more}),
                          'preparing', self.service, leaving, migrated_to,
                          connecting)

    def metadata(self, volume_id):
        """What the admin metadata of a row say, deleted ones too."""
        with db.main_context_manager.reader.using(self.ctxt) as session:
            row = models.VolumeAdminMetadata
            return dict(session.query(row.key, row.value).filter_by(
                volume_id=volume_id).all())

    def as_first_version(self, move):
        """Record a move as the first version did."""
        values = move.transfer.as_dict()
        values.update(('export_' + key, value)
                      for key, value in values.pop('export').items())
        values.update(leaving=','.join(move.leaving), shown='no', done='')
        with db.main_context_manager.writer.using(self.ctxt) as session:
            row = models.VolumeAdminMetadata
            session.query(row).filter(row.key.startswith(
                rows.PACKED)).delete(synchronize_session=False)
            rows._put(session, move.move_id, {
                rows.PREFIX + key: str(value)
                for key, value in values.items()})

    def refresh(self, volume_id=None):
        return objects.Volume.get_by_id(self.ctxt,
                                        volume_id or self.volume.id)

    def identity(self, volume_id=None):
        volume = self.refresh(volume_id)
        return {field: getattr(volume, field)
                for field in (*rows.IDENTITY, 'name')}


class BeginTest(RowsTestCase):

    def test_move_is_read_as_it_was_written(self):
        move = self.begin(leaving=('x', 'y'))
        self.assertEqual(move, rows.get(self.ctxt, move.move_id))
        self.assertEqual([move], rows.for_volume(self.ctxt, self.volume.id))

    def test_migration_is_read_as_it_was_written_and_names_the_pool(self):
        move = self.begin(migrated_to=base.B + '#other')
        self.assertTrue(move.is_migration)
        self.assertEqual(move, rows.get(self.ctxt, move.move_id))
        rows.change_state(self.ctxt, move, 'migrating', swap=True)
        self.assertEqual(base.B + '#other', self.refresh().host)

    def test_move_with_many_attachments_is_read_as_it_was_written(self):
        leaving = tuple('attachment-%d' % number for number in range(100))
        move = self.begin(leaving=leaving)
        self.assertEqual(move, rows.get(self.ctxt, move.move_id))

    def test_move_takes_few_rows(self):
        move = self.begin(leaving=('x', 'y'))
        self.assertLessEqual(len(self.metadata(move.move_id)), 8)

    def test_what_connects_is_noted_with_it(self):
        first, second = ({'id': '%d-attachment' % number,
                          'instance_uuid': 'instance-%d' % number}
                         for number in (1, 2))
        self.begin(connecting=[first])
        self.assertEqual([first], rows.connecting(
            self.ctxt, self.volume.id, [first, second]))
        self.assertEqual({'instance-1'},
                         rows.given_to(self.ctxt, self.volume.id))

    def test_move_is_not_there_without_what_connects(self):
        with mock.patch.object(rows, '_note_connecting',
                               side_effect=ValueError('the power fails')):
            self.assertRaises(ValueError, self.begin, connecting=[
                {'id': '1-attachment', 'instance_uuid': 'instance-1'}])
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))

    def test_its_rows_are_made_with_two_statements(self):
        with base.Statements() as statements:
            self.begin(leaving=('x', 'y'))
        self.assertEqual(2, len(statements.texts))

    def test_what_changes_of_it_has_one_row_and_what_is_empty_none(self):
        move = rows.change_state(self.ctxt, self.begin(), 'starting')
        move = rows.record_done(self.ctxt, move, ('a',))
        rows.change_state(self.ctxt, move, 'migrating')
        with db.main_context_manager.reader.using(self.ctxt) as session:
            keys = [key for key, in session.query(
                models.VolumeAdminMetadata.key).filter_by(
                volume_id=move.move_id)]
        self.assertEqual(len(set(keys)), len(keys))
        self.assertNotIn(rows.PROBLEM, keys)

    def test_users_row_is_not_touched(self):
        before = self.refresh().obj_to_primitive()
        self.begin()
        self.assertEqual(before, self.refresh().obj_to_primitive())


class HiddenTest(RowsTestCase):

    def test_user_sees_one_volume(self):
        self.volume.update({'user_id': 'user', 'project_id': 'project'})
        self.volume.save()
        move = self.begin(self.refresh())
        self.assertEqual('project', self.refresh(move.move_id).project_id)
        for name in ('cinder.volume.rpcapi.VolumeAPI',
                     'cinder.scheduler.rpcapi.SchedulerAPI'):
            self.patch(name)
        ctxt = context.RequestContext('user', 'project')
        with mock.patch.object(context.RequestContext, 'authorize'):
            found = volume_api.API().get_all(ctxt)
        self.assertEqual([self.volume.id], [volume.id for volume in found])

    def test_shadow_is_of_the_same_project_and_costs_nothing(self):
        move = self.begin()
        shadow = self.refresh(move.move_id)
        self.assertEqual(self.volume.project_id, shadow.project_id)
        self.assertFalse(shadow.use_quota)
        self.assertEqual('maintenance', shadow.status)


class SwapTest(RowsTestCase):

    def setUp(self):
        super().setUp()
        self.move = self.begin()

    def change(self, state, move=None, swap=True):
        return rows.change_state(self.ctxt, move or self.move, state, swap)

    def test_identities_change_places(self):
        user, shadow = (self.identity(), self.identity(self.move.move_id))
        self.change('starting')
        self.assertEqual(shadow, self.identity())
        self.assertEqual(user, self.identity(self.move.move_id))
        self.assertEqual(base.B + '#local', self.refresh().host)

    def test_nothing_else_does(self):
        same = ('id', 'status', 'display_name', 'migration_status',
                'use_quota', 'size', 'attach_status')

        def others():
            return [[getattr(self.refresh(found), field) for field in same]
                    for found in (self.volume.id, self.move.move_id)]
        before = others()
        self.change('starting')
        self.assertEqual(before, others())

    def test_swap_is_its_own_inverse(self):
        before = [self.identity(), self.identity(self.move.move_id)]
        starting = self.change('starting')
        self.change('aborting', starting)
        self.assertEqual(before, [self.identity(),
                                  self.identity(self.move.move_id)])

    def test_generation_goes_with_the_identity(self):
        self.assertEqual(1, rows.generation_of(self.ctxt, self.volume.id))
        starting = self.change('starting')
        self.assertEqual(2, rows.generation_of(self.ctxt, self.volume.id))
        self.change('aborting', starting)
        self.assertEqual(1, rows.generation_of(self.ctxt, self.volume.id))

    def test_second_move_swaps_names_of_the_first(self):
        rows.forget(self.ctxt, self.change('starting'))
        volume = self.refresh()
        first = volume.name
        self.assertNotEqual(volume.id, volume.name_id)
        move = self.begin(volume, source_host=base.B,
                          destination_host=base.A, generation=3)
        self.change('starting', move)
        self.assertEqual(move.transfer.destination_name, self.refresh().name)
        self.assertEqual(first, self.refresh(move.move_id).name)

    def test_swap_is_one_transaction(self):
        before = [self.identity(), self.identity(self.move.move_id)]
        put = rows._put

        def fail(session, volume_id, values):
            put(session, volume_id, values)
            if rows.GENERATION in values:
                raise ValueError('the connection is gone')
        with mock.patch.object(rows, '_put', fail):
            self.assertRaises(ValueError, self.change, 'starting')
        self.assertEqual(before, [self.identity(),
                                  self.identity(self.move.move_id)])
        self.assertEqual(self.move, rows.get(self.ctxt, self.move.move_id))

    def test_of_two_that_ask_one_gets_it(self):
        self.change('starting', swap=False)
        error = self.assertRaises(exception.MoveChanged, self.change,
                                  'aborting')
        self.assertIn(self.move.move_id, str(error))
        self.assertEqual('starting', rows.get(self.ctxt,
                                              self.move.move_id).state)
        self.assertEqual(base.A + '#local', self.refresh().host)

    def test_move_that_is_forgotten_does_not_change(self):
        rows.forget(self.ctxt, self.move)
        self.assertRaises(exception.MoveChanged, self.change, 'starting')

    def test_new_state_has_no_steps_and_no_problem(self):
        move = rows.record_problem(self.ctxt, rows.record_done(
            self.ctxt, self.move, ('export_source',)), 'it rains')
        self.change('starting', move, swap=False)
        found = rows.get(self.ctxt, self.move.move_id)
        self.assertEqual(((), ''), (found.done, found.problem))
        self.assertGreaterEqual(found.since, self.move.since)


class RecordTest(RowsTestCase):

    def setUp(self):
        super().setUp()
        self.move = self.begin()

    def found(self):
        return rows.get(self.ctxt, self.move.move_id)

    def test_steps(self):
        move = rows.record_done(self.ctxt, self.move, ('a', 'b'))
        self.assertEqual(('a', 'b'), self.found().done)
        self.assertEqual(move, self.found())

    def test_step_that_is_done_ends_the_problem(self):
        move = rows.record_problem(self.ctxt, self.move, 'it rains')
        self.assertEqual('it rains', self.found().problem)
        rows.record_done(self.ctxt, move, ('a',))
        self.assertEqual('', self.found().problem)

    def test_nothing_is_noted_of_a_state_that_is_over(self):
        rows.change_state(self.ctxt, self.move, 'discarding')
        rows.record_problem(self.ctxt, self.move, 'it rains')
        self.assertRaises(exception.MoveChanged, rows.record_done, self.ctxt,
                          self.move, ('a',))
        self.assertEqual(((), ''), (self.found().done, self.found().problem))

    def test_long_problem_is_cut(self):
        move = rows.record_problem(self.ctxt, self.move, 'x' * 1000)
        self.assertEqual('x' * 255, self.found().problem)
        self.assertEqual(move, self.found())

    def test_same_problem_is_written_once(self):
        move = rows.record_problem(self.ctxt, self.move, 'x' * 1000)
        with mock.patch.object(rows, '_record') as record:
            rows.record_problem(self.ctxt, move, 'x' * 1000)
        record.assert_not_called()

    def test_nothing_but_problems_is_ever_cut(self):
        done = tuple('step%d' % number for number in range(100))
        rows.record_done(self.ctxt, self.move, done)
        self.assertEqual(done, self.found().done)

    def test_steps_of_every_state_fit_the_column(self):
        for rules in table.TABLE.values():
            self.assertLess(len(','.join(step.name for step in rules.steps)),
                            rows.MOST_CHARACTERS)


@ddt.ddt
class DeadlockTest(RowsTestCase):
    """A cluster of databases refuses a transaction for another one's sake."""

    def setUp(self):
        super().setUp()
        self.move = self.begin()
        self.patch('oslo_db.api.time.sleep')
        self.refused = 0

    def refuse(self, times):
        """Let transactions fail when they are committed."""
        def commit(session):
            if self.refused < times:
                self.refused += 1
                raise db_exception.DBDeadlock()
        sa.event.listen(orm.Session, 'before_commit', commit)
        self.addCleanup(sa.event.remove, orm.Session, 'before_commit',
                        commit)

    CHANGES = (
        ('swap', lambda ctxt, move: rows.change_state(
            ctxt, move, 'starting', swap=True)),
        ('done', lambda ctxt, move: rows.record_done(ctxt, move, ('a',))),
        ('problem', lambda ctxt, move: rows.record_problem(ctxt, move, 'x')),
        ('forget', rows.forget),
        ('noted', lambda ctxt, move: rows.note_connecting(
            ctxt, move.volume_id, [{'id': 'a', 'instance_uuid': None}])),
        ('handed over', lambda ctxt, move: rows.hand_over(
            ctxt, [move], move.volume_id)))

    @ddt.data(*CHANGES)
    @ddt.unpack
    def test_it_is_tried_again(self, _name, change):
        self.refuse(2)
        change(self.ctxt, self.move)
        self.assertEqual(2, self.refused)

    def test_identities_change_places_once(self):
        before = self.identity()
        self.refuse(1)
        rows.change_state(self.ctxt, self.move, 'starting', swap=True)
        self.assertEqual(before, self.identity(self.move.move_id))
        self.assertEqual(2, rows.generation_of(self.ctxt, self.volume.id))

    def test_not_for_ever(self):
        self.refuse(100)
        self.assertRaises(db_exception.DBDeadlock, rows.record_done,
                          self.ctxt, self.move, ('a',))


class FindTest(RowsTestCase):

    def test_moves_of_a_host_are_those_of_both_sides(self):
        move = self.begin()
        for host in (base.A, base.B):
            self.assertEqual([move], rows.for_host(self.ctxt, host))
        self.assertEqual([], rows.for_host(self.ctxt, base.C))

    def plans(self, find, *arguments):
        """How the database finds what a function asks it for."""
        with base.Statements() as statements:
            self.assertEqual(1, len(find(self.ctxt, *arguments)))
        with db.get_engine().connect() as connection:
            return [plan for statement, values in statements.asked
                    for *_ids, plan in connection.exec_driver_sql(
                        'EXPLAIN QUERY PLAN ' + statement, values)]

    def test_moves_of_a_volume_differ_where_devices_are_told_apart(self):
        # hydrator/daemon/src/devices.rs: ublk has 8 bytes for an identity.
        first, second = (uuid.UUID(rows.new_move_id(self.volume.id)).bytes[:8]
                         for _ in range(2))
        self.assertNotEqual(first, second)

    def test_moves_of_a_volume_are_found_by_an_index(self):
        self.begin()
        tables = [plan for plan
                  in self.plans(rows.for_volume, self.volume.id)
                  if plan.startswith(('SCAN', 'SEARCH'))]
        self.assertEqual(5, len(tables))
        for plan in tables:
            # One that tells one volume from another
            self.assertRegex(plan, r'^SEARCH .*\((volume_)?id[=>]')

    def test_moves_of_a_host_are_found_among_the_volumes_there_are(self):
        self.begin()
        for plan in self.plans(rows.for_host, base.B):
            self.assertNotIn('SCAN', plan)

    def test_moves_of_a_deleted_volume_are_found(self):
        move = self.begin()
        db.volume_destroy(self.ctxt, self.volume.id)
        self.assertEqual([move], rows.for_volume(self.ctxt, self.volume.id))

    def test_moves_that_are_handed_over_are_those_of_the_other(self):
        move, other = self.begin(), self.make_volume()
        rows.hand_over(self.ctxt, [move], other.id)
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        self.assertEqual([(move.move_id, other.id)], [
            (found.move_id, found.volume_id)
            for found in rows.for_volume(self.ctxt, other.id)])

    def test_move_of_the_first_version(self):
        move = self.begin(leaving=('x', 'y'), move_id=fake.UUID1)
        self.as_first_version(move)
        self.assertEqual(move, rows.get(self.ctxt, move.move_id))
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        rows.link(self.ctxt, rows.for_host(self.ctxt, base.B))
        self.assertEqual([move], rows.for_volume(self.ctxt, self.volume.id))
        rows.forget(self.ctxt, move)
        self.assertEqual({}, self.metadata(self.volume.id))

    def test_volume_names_no_moves_that_are_found_without(self):
        rows.link(self.ctxt, [self.begin()])
        self.assertEqual({}, self.metadata(self.volume.id))

    def test_moves_come_in_the_order_of_their_states(self):
        first = self.begin()
        second = self.begin(self.make_volume())
        rows.change_state(self.ctxt, first, 'migrating')
        self.assertEqual([second.move_id, first.move_id], [
            move.move_id for move in rows.for_host(self.ctxt, base.A)])

    def test_forgotten_move_is_nowhere(self):
        move = self.begin()
        rows.forget(self.ctxt, move)
        self.assertIsNone(rows.get(self.ctxt, move.move_id))
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        self.assertEqual([], rows.for_host(self.ctxt, base.A))
        self.refresh()

    def test_forgetting_twice_does_no_harm(self):
        move = self.begin()
        rows.forget(self.ctxt, move)
        self.assertRaises(exception.MoveChanged, rows.forget, self.ctxt,
                          move)
        self.refresh()

    def test_move_that_has_gone_on_is_not_forgotten(self):
        move = self.begin()
        after = rows.change_state(self.ctxt, move, 'discarding')
        self.assertRaises(exception.MoveChanged, rows.forget, self.ctxt,
                          move)
        self.assertEqual(after, rows.get(self.ctxt, move.move_id))

    def test_nothing_is_left_of_a_forgotten_move(self):
        move = self.begin()
        rows.forget(self.ctxt, move)
        shadow = objects.Volume.get_by_id(
            self.ctxt.elevated(read_deleted='yes'), move.move_id)
        self.assertTrue(shadow.deleted)
        self.assertEqual('deleted', shadow.status)
        self.assertEqual([], self.noted(move))

    def noted(self, move):
        with db.main_context_manager.reader.using(self.ctxt) as session:
            return session.query(models.VolumeAdminMetadata.key).filter_by(
                volume_id=move.move_id, deleted=False).all()

    def test_nothing_is_noted_of_a_forgotten_move(self):
        move = self.begin()
        rows.forget(self.ctxt, move)
        rows.record_problem(self.ctxt, move, 'it rains')
        self.assertRaises(exception.MoveChanged, rows.record_done, self.ctxt,
                          move, ('a',))
        self.assertEqual([], self.noted(move))

    def test_cinders_own_migration_is_no_move(self):
        other = self.make_volume(migration_status='target:x')
        self.assertIsNone(rows.get(self.ctxt, other.id))

    def test_an_ordinary_context_reads_it_too(self):
        move = self.begin()
        ctxt = context.RequestContext('user', 'project')
        self.assertEqual(move, rows.get(ctxt, move.move_id))


class StandingTest(RowsTestCase):

    def copies(self, host=base.A):
        return [(copy.name, copy.volume_id, copy.generation)
                for copy in rows.copies_on(self.ctxt, host)
                if copy.role is copies.Role.STANDING]

    def test_users_volume_with_its_generation(self):
        self.assertEqual([(self.volume.name, self.volume.id, 1)],
                         self.copies())

    def test_shadow_is_none(self):
        self.begin()
        self.assertEqual([], self.copies(base.B))

    def test_copy_goes_with_the_identity(self):
        move = self.begin()
        rows.change_state(self.ctxt, move, 'starting', swap=True)
        self.assertEqual([], self.copies())
        self.assertEqual([(move.transfer.destination_name, self.volume.id,
                           2)], self.copies(base.B))

    def test_volumes_that_are_made_or_deleted_are_passing(self):
        for status in ('creating', 'deleting'):
            self.volume.status = status
            self.volume.save()
            self.assertEqual([], self.copies())
            passing, = rows.copies_on(self.ctxt, base.A)
            self.assertEqual((self.volume.name, copies.Role.PASSING, status),
                             (passing.name, passing.role, passing.state))

    def test_deleted_volume_is_none(self):
        db.volume_destroy(self.ctxt, self.volume.id)
        self.assertEqual([], self.copies())

    def test_host_is_no_pattern(self):
        self.make_volume('node_1@local')
        self.make_volume('nodeX1@local')
        self.make_volume('node_11@local')
        self.make_volume('node_1@local2')
        self.assertEqual(1, len(self.copies('node_1@local')))
        self.assertEqual([], self.copies('node%'))

    def test_row_without_a_pool(self):
        self.volume.host = base.A
        self.volume.save()
        self.assertEqual(1, len(self.copies()))


class AttachmentsTest(RowsTestCase):

    def test_attachments(self):
        attachment = objects.VolumeAttachment(
            self.ctxt, volume_id=self.volume.id, instance_uuid=INSTANCE,
            attach_status='attached', mountpoint='na')
        attachment.connector = {'host': 'a'}
        attachment.create()
        self.assertEqual(
            [{'id': attachment.id, 'instance_uuid': INSTANCE,
              'status': 'attached', 'mountpoint': 'na', 'kind': '',
              'connector': {'host': 'a'}}],
            rows.attachments(self.ctxt, self.volume.id))

    def test_attachment_without_a_connector(self):
        objects.VolumeAttachment(self.ctxt, volume_id=self.volume.id,
                                 attach_status='reserved').create()
        found = rows.attachments(self.ctxt, self.volume.id)
        self.assertEqual([{}], [row['connector'] for row in found])
