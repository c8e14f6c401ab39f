# SPDX-License-Identifier: Apache-2.0
"""What users do with instances in the lab, and what their guests say."""

from collections.abc import Callable
from collections.abc import Iterable
import json
import re
import tempfile
import time
from typing import Any

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import configuration
from lab import control_plane
from lab import node as nodes
from lab import nova
from lab import nova_setup

# Seconds; a guest's instructions are translated, and its node's, too
PATIENCE = 300
# After which one that was alive is silent
SILENCE = 120
# So often its disks are looked at then.
LOOKS = 5
# What the guest's driver says of a queue whose memory is not as it has left it
# (Linux, drivers/virtio/virtio_ring.c, BAD_RING); all that it is asked for
# fails from then on.
_BAD_RING = re.compile(r'virtio\d+: req\.\d+:id \d+ '
                       r'(?:is not a head!|out of range)')
_FAILS = 'Input/output error'
# No disk can answer so: virtio has no word for it (VIRTIO_BLK_S_...).
_NO_MEMORY = 'Cannot allocate memory'


class InstanceError(Exception):
    """An instance came into a state that nobody asked for."""


class Instance:
    """An instance of Nova's whose guest is the lab's own."""

    def __init__(self, cloud: clouds.Cloud, identity: str) -> None:
        self.id = identity
        self._cloud = cloud
        self._api = cloud.compute_api
        self._path = f'/servers/{identity}'

    def show(self) -> dict[str, Any]:
        """The server as the API shows it to an administrator."""
        return self._api.get(self._path).json()['server']

    @property
    def status(self) -> str | None:
        """ACTIVE and the like; None if there is none."""
        try:
            return self.show()['status']
        except exceptions.NotFound:
            return None

    @property
    def node(self) -> nodes.Node:
        """Where it is."""
        return self._cloud.node(self.show()['OS-EXT-SRV-ATTR:host'])

    def wait_for(self, status: str, timeout: float = PATIENCE) -> None:
        """Wait until it has a status, and nothing is under way.

        :raises InstanceError: it failed, or took more than `timeout` s
        """
        end = time.monotonic() + timeout
        while True:
            found = self.show()
            if (found['status'] == status
                    and not found['OS-EXT-STS:task_state']):
                return
            if found['status'] == 'ERROR' or time.monotonic() > end:
                raise InstanceError(
                    f'{self.id} is {found["status"]} '
                    f'({found["OS-EXT-STS:task_state"]}), not {status}: '
                    f'{found.get("fault", {}).get("message", "no fault")}')
            time.sleep(0.5)

    def wait_until_booted(self, volume_id: str) -> None:
        """Wait until its guest uses the volume that it boots from.

        :raises InstanceError: it failed, or takes too long
        """
        self.wait_for('ACTIVE')
        self.wait_for_report('found', volume_id)

    def act(self, action: str, arguments: Any = None,
            version: str = configuration.COMPUTE_VERSION) -> None:
        """Ask for an action of the API; does not wait.

        :param version: microversion that the action needs
        """
        self._api.post(f'{self._path}/action', json={action: arguments},
                       headers={'OpenStack-API-Version': 'compute ' + version})

    def live_migrate(self, node: nodes.Node) -> None:
        """Move it to another node while it runs.

        :raises InstanceError: it is not there, in the end
        """
        before = self.show()['status']
        self.act('os-migrateLive', {'host': node.name,
                                    'block_migration': 'auto'})
        self.wait_for('PAUSED' if before == 'PAUSED' else 'ACTIVE')
        if self.node.name != node.name:
            raise InstanceError(f'{self.id} is still on {self.node.name}: '
                                f'{self.migrations()}')

    def evacuate(self, node: nodes.Node) -> None:
        """Ask for it on another node, since its own is lost; does not wait."""
        self.act('evacuate', {'host': node.name}, version='2.95')

    def migrations(self) -> list[str]:
        """Statuses of all its migrations."""
        return [found['status'] for found in self._api.get(
            f'/os-migrations?instance_uuid={self.id}').json()['migrations']]

    def abort_live_migration(self) -> None:
        """Ask libvirt to give up the copying of its memory, once it runs.

        :raises InstanceError: it did not run within 300 s
        """
        end = time.monotonic() + PATIENCE
        while not self.give_up_live_migration():
            if time.monotonic() > end:
                raise InstanceError(f'{self.id} does not migrate live: '
                                    f'{self.migrations()}')
            time.sleep(0.1)

    def give_up_live_migration(self) -> bool:
        """Ask libvirt to give it up if it runs; whether it does."""
        path = f'{self._path}/migrations'
        for found in self._api.get(path).json()['migrations']:
            if found['status'] == 'running':
                self._api.delete(f'{path}/{found["id"]}')
                return True
        return False

    def downtime(self) -> float | None:
        """Seconds for which its last live migration stopped it, as libvirt
        tells; None if it does not know.
        """
        found = re.search(r'Total downtime:\s+([\d.]+)\s+(m?s)\b',
                          self._virsh('domjobinfo', '--completed',
                                      '--keep-completed'))
        if found is None:
            return None
        return float(found[1]) / (1000 if found[2] == 'ms' else 1)

    @property
    def name(self) -> str:
        """What libvirt calls it."""
        return self.show()['OS-EXT-SRV-ATTR:instance_name']

    @property
    def runs(self) -> bool:
        """Whether libvirt has it running on its node."""
        return self._virsh('domstate').strip() == 'running'

    def _virsh(self, command: str, *options: str) -> str:
        """What virsh says of it on its node; nothing when that fails."""
        return self.node.run(['virsh', command, self.name, *options],
                             check=False).stdout

    def description(self) -> str:
        """What libvirt runs, in XML."""
        return self._virsh('dumpxml')

    def failures(self) -> list[str]:
        """What its events say that went wrong."""
        path = f'{self._path}/os-instance-actions'
        return [event['details']
                for action in self._api.get(path).json()['instanceActions']
                for event in self._api.get(
                    f'{path}/{action["request_id"]}', headers={
                        'OpenStack-API-Version': 'compute 2.84'}).json()[
                            'instanceAction']['events']
                if event['result'] == 'Error']

    def reboot(self) -> None:
        """Take its power and give it back."""
        self.act('reboot', {'type': 'HARD'})
        self.wait_for('ACTIVE')

    def attach(self, volume_id: str) -> None:
        """Plug a volume in, and wait until its guest uses it.

        :raises InstanceError: Nova has given up, or the guest does not see it
        """
        def check() -> None:
            if volume_id not in self.volumes():
                raise InstanceError(
                    f'{self.id} does not get {volume_id}: {self.failures()}')

        known = self.reports()
        self.request_volume(volume_id)
        self.wait_for_report('found', volume_id, len(known), check=check)

    def request_volume(self, volume_id: str) -> None:
        """Ask for a volume to be plugged in; does not wait."""
        self._api.post(f'{self._path}/os-volume_attachments', json={
            'volumeAttachment': {'volumeId': volume_id}})

    def detach(self, volume_id: str) -> None:
        """Unplug a volume, and wait until Nova has forgotten it."""
        self._api.delete(f'{self._path}/os-volume_attachments/{volume_id}')
        self._wait_while(lambda: volume_id in self.volumes(),
                         f'keeps {volume_id}')

    def end_elsewhere(self) -> None:
        """End its guest on all nodes but that where Nova has it, and remove
        what they have of it.

        :raises LabError: one of them does not answer
        """
        name, home = self.name, self.node.name
        for node in self._cloud.nodes:
            if node.name == home:
                continue
            # One whose libvirtd does not answer may have it running.
            if name in node.run(['virsh', 'list', '--name']).stdout.split():
                node.run(['virsh', 'destroy', name])
            node.run(['virsh', 'undefine', name], check=False)
            # Nova moves it to no node that has this.
            node.run(['rm', '-rf', f'{nova.STATE}/instances/{self.id}'])

    def attach_anew(self, volumes: Iterable[str]) -> None:
        """Let Nova attach volumes of a stopped instance where that is,
        whatever it has noted of another node: with its own tool, as an
        operator does.

        :raises LabError: it is not stopped, say
        """
        connector = self.node.run(
            nova.manage_on_node(self.node.place, 'volume_attachment',
                                'get_connector', '--json'),
            timeout=PATIENCE).stdout
        with tempfile.NamedTemporaryFile('w', suffix='.json') as file:
            file.write(connector)
            file.flush()
            for volume_id in volumes:
                self._cloud.run(control_plane.manage(
                    self._cloud.place, nova.NOVA, 'volume_attachment',
                    'refresh', self.id, volume_id, file.name),
                    timeout=PATIENCE)

    def volumes(self) -> list[str]:
        """Ids of its volumes."""
        return list(self.attachments())

    def attachments(self) -> dict[str, str]:
        """Ids of Cinder's attachments that it has, by the volume's id."""
        return {found['volumeId']: found['attachment_id']
                for found in self._api.get(
                    f'{self._path}/os-volume_attachments', headers={
                        'OpenStack-API-Version': 'compute 2.89'}).json()[
                            'volumeAttachments']}

    def delete(self) -> None:
        """Delete it and wait until it is gone; its volumes stay."""
        self._api.delete(self._path)
        self._wait_while(lambda: self.status is not None, 'is not deleted')

    def _wait_while(self, condition: Callable[[], bool], complaint: str
                    ) -> None:
        end = time.monotonic() + PATIENCE
        while condition():
            if time.monotonic() > end:
                raise InstanceError(f'{self.id} {complaint}: {self.status}')
            time.sleep(0.5)

    # -- What its guest says ------------------------------------------------

    def console(self) -> str:
        """What stands on its console since it came to its node."""
        return self.node.run(
            ['cat', f'{nova.STATE}/instances/{self.id}/console.log'],
            check=False).stdout

    @property
    def panicked(self) -> bool:
        """Whether its kernel gave up, and not because of a disk."""
        return 'Kernel panic' in self.console() and not self._disk_is_wrong()

    def _disk_is_wrong(self) -> bool:
        return any(report['event'] == 'wrong' for report in self.reports())

    def reports(self) -> list[dict[str, Any]]:
        """The guest's reports among that, see ``lab/guest``.

        That a disk fails is none where the guest's memory does: it says
        nothing of the disk.
        """
        console = self.console()
        excuses = ((_NO_MEMORY, _FAILS) if _BAD_RING.search(console)
                   else (_NO_MEMORY,))
        found = []
        for line in console.splitlines():
            try:
                report = json.loads(line)
            except ValueError:
                # The kernel's, or not complete yet
                continue
            if isinstance(report, dict) and not report.get(
                    'why', '').startswith(excuses):
                found.append(report)
        return found

    def wait_for_report(self, event: str, volume_id: str, after: int = 0,
                        wanted: Callable[[dict[str, Any]], bool] = bool,
                        check: Callable[[], None] = lambda: None,
                        timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait until the guest reports an event of a volume.

        :param after: so many reports don't count
        :param wanted: which of these reports count
        :param check: called from time to time; raises what ends the wait
        :param timeout: seconds
        :raises InstanceError: its disk is wrong, its kernel has panicked, or
            it takes too long
        """
        end = time.monotonic() + timeout
        while True:
            reports = self.reports()
            for report in reports[after:]:
                # virtio has place for 20 characters.
                if (report['event'] == event and wanted(report)
                        and report['serial'] == volume_id[:20]):
                    return report
            wrong = [report for report in reports
                     if report['event'] == 'wrong']
            if wrong or self.panicked or time.monotonic() > end:
                raise InstanceError(
                    f'{self.id} does not report "{event}" of {volume_id}; '
                    f'libvirt: {self._virsh("domstate", "--reason").strip()}; '
                    f'disks that do not answer: {self._waiting_disks()}; '
                    f'console: {wrong or self.console()[-2000:]}')
            check()
            time.sleep(0.5)

    def _waiting_disks(self) -> list[str]:
        """Block devices of its node that answer nobody: each time that one
        looks they have requests in flight (``/sys/block/*/inflight``).

        A disk that does not answer keeps a guest as silent as a processor
        that stands still; only the one is a matter of its disks.
        """
        waiting: set[str] | None = None
        for _look in range(LOOKS):
            found = set(self.node.run(
                ['sh', '-c', 'cd /sys/block; grep -l "[1-9]" */inflight'],
                check=False).stdout.split())
            waiting = found if waiting is None else waiting & found
            time.sleep(1)
        return sorted(waiting or ())

    def wait_for_stamps(self, volume_id: str) -> None:
        """Wait until the guest, booted again, has found what it had written.

        :raises InstanceError: its disk is wrong, or it takes too long
        """
        # The console may still have what was said before.
        self.wait_for_report('found', volume_id, wanted=lambda report:
                             None not in report['before'])

    def assert_alive(self, timeout: float = PATIENCE) -> None:
        """Wait until the guest has written to each of its volumes since now.

        :param timeout: seconds, for each of them
        :raises InstanceError: a disk is wrong, or it has died
        """
        after = len(self.reports())
        for volume_id in self.volumes():
            self.wait_for_report('alive', volume_id, after, timeout=timeout)

    def go_on(self) -> bool:
        """Wait until it lives, or lives again where its kernel gave up.

        A guest whose instructions are translated may panic, or be silent for
        ever, after a live migration on a busy machine, from memory that is not
        right; its disks have to answer, and what is on them has to be right.
        One that libvirt has stopped is none of these.

        :returns: whether its kernel had given up
        :raises InstanceError: a disk is wrong, or does not answer; or it does
            not run
        """
        try:
            self.assert_alive(SILENCE)
            return False
        except InstanceError:
            if not self.panicked and (not self.runs or self._disk_is_wrong()
                                      or self._waiting_disks()):
                raise
        self.boot_again()
        return True

    def boot_again(self) -> None:
        """Boot it with new memory, and wait until its guest has found what
        it had written to each of its volumes and writes on.

        :raises InstanceError: a disk is wrong, or it has died
        """
        self.reboot()
        for volume_id in self.volumes():
            self.wait_for_stamps(volume_id)
        self.assert_alive()


def boot(cloud: clouds.Cloud, volume_id: str, node: nodes.Node | None = None
         ) -> Instance:
    """An instance that boots from a volume; waits until its guest uses it.

    :param node: where; the scheduler chooses if it is None
    """
    instance = request(cloud, nova_setup.GUEST, volume_id, node)
    instance.wait_until_booted(volume_id)
    return instance


def request(cloud: clouds.Cloud, name: str, volume_id: str,
            node: nodes.Node | None = None) -> Instance:
    """Ask for an instance that boots from a volume, as :func:`boot` does;
    does not wait.
    """
    return _requested(cloud, name, node, source_type='volume', uuid=volume_id)


def request_of_snapshot(cloud: clouds.Cloud, name: str, snapshot_id: str,
                        node: nodes.Node | None = None) -> Instance:
    """Ask for an instance that boots from a volume that Nova is to make of a
    snapshot; does not wait.
    """
    return _requested(cloud, name, node, source_type='snapshot',
                      uuid=snapshot_id)


def request_of_image(cloud: clouds.Cloud, name: str, volume_type: str,
                     node: nodes.Node | None = None) -> Instance:
    """Ask for an instance that boots from a volume of 1 GiB that Nova is to
    make of :func:`image`; does not wait.
    """
    return _requested(cloud, name, node, source_type='image',
                      uuid=image(cloud), volume_size=1,
                      volume_type=volume_type)


def _requested(cloud: clouds.Cloud, name: str, node: nodes.Node | None,
               **disk: Any) -> Instance:
    asked_for = {'name': name, 'flavorRef': nova_setup.GUEST,
                 'networks': 'none', 'block_device_mapping_v2': [{
                     'boot_index': 0, 'destination_type': 'volume', **disk}]}
    if node:
        asked_for['host'] = node.name
    created = cloud.compute_api.post(
        '/servers', json={'server': asked_for}).json()['server']['id']
    return Instance(cloud, created)


def named(cloud: clouds.Cloud, prefix: str) -> list[str]:
    """Ids of all instances whose name begins so."""
    return [found['id'] for found in
            cloud.compute_api.get('/servers').json()['servers']
            if found['name'].startswith(prefix)]


def declare_down(cloud: clouds.Cloud, node: nodes.Node, down: bool = True
                 ) -> None:
    """Tell Nova that a node is lost, as an operator who has fenced it does;
    or that it is back.
    """
    _update_service(cloud, node, {'forced_down': down})


def enable(cloud: clouds.Cloud, node: nodes.Node, enabled: bool = True
           ) -> None:
    """Let a node have new instances, or none any more."""
    _update_service(cloud, node, {
        'status': 'enabled' if enabled else 'disabled'})


def wait_for_compute(cloud: clouds.Cloud, node: nodes.Node) -> None:
    """Wait until a node's nova-compute has reported since now.

    Nova counts one as there that reported of late, and one that has only begun
    as lost: then it forgets an instance whose deletion is asked for, and the
    node is left with the guest.

    :raises InstanceError: it has not within :data:`PATIENCE` seconds
    """
    known = _service(cloud, node)['updated_at']
    end = time.monotonic() + PATIENCE
    while (found := _service(cloud, node))['state'] != 'up' or (
            found['updated_at'] == known):
        if time.monotonic() > end:
            raise InstanceError(
                f'nova-compute on {node.name} is {found["state"]} and has '
                f'reported at {found["updated_at"]} last.')
        time.sleep(0.5)


def _update_service(cloud: clouds.Cloud, node: nodes.Node,
                    changes: dict[str, Any]) -> None:
    cloud.compute_api.put('/os-services/' + _service(cloud, node)['id'],
                          json=changes)


def _service(cloud: clouds.Cloud, node: nodes.Node) -> dict[str, Any]:
    [found] = cloud.compute_api.get(
        '/os-services', params={'host': node.name,
                                'binary': 'nova-compute'}).json()['services']
    return found


def image(cloud: clouds.Cloud) -> str:
    """Id of the image of the lab's own guest."""
    [found] = cloud.image_api.get('/v2/images', params={
        'name': nova_setup.GUEST}).json()['images']
    return found['id']
