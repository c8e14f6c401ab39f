# SPDX-License-Identifier: Apache-2.0
"""What peers ask of each other beyond Cinder's own volume RPC.

Topic ``cinder-localstor.<host@backend>``.  Each call about a move carries all
that the move is, and is idempotent, so a repeated or late message does no
harm.

History::

    1.0  identify, examine, run, is_source_used, drive
    1.1  remaining; a copy that ``run`` gives up is wiped after the answer
    1.2  delete_snapshot
    1.3  offer; copies in ``run``
    1.4  copies of volumes on other nodes
    1.5  examine, with what a volume's type wants
    1.6  unmanage_snapshot
    1.7  volumes that are reverted to snapshots
    1.8  offer, with what the source can be read by

A peer of 1.0 wipes a copy before it answers, and has nothing that remains.  It
is asked nothing that it does not know: each call names the version that it
came with.
"""

from __future__ import annotations

from collections.abc import Collection
import functools
from typing import Any, Protocol

from cinder import context
from cinder import objects
from cinder import rpc
from oslo_log import log as logging
import oslo_messaging as messaging

from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

LOG = logging.getLogger(__name__)

VERSION = '1.8'
FIRST_VERSION = '1.0'
# The first that knows of copies
COPIES = '1.3'
# The first that takes snapshots for copies of others
CLONES = '1.4'
# The first that knows of extra specs
WISHES = '1.5'
# The first that can read what is recorded of a revert
REVERTS = '1.7'
# The first that is told what a source can be read by
TRANSPORTS = '1.8'
TOPIC = 'cinder-localstor'

# Seconds that a peer may work on a request that no user waits for, as long as
# it shows that it is alive
PATIENCE = 24 * 3600


# What a peer of an earlier version says to what it does not know
UNSUPPORTED = 'UnsupportedVersion'


def _target(host: str, version: str) -> messaging.Target:
    return messaging.Target(topic='%s.%s' % (TOPIC, host),
                            server=host.partition('@')[0], version=version)


class Answers(Protocol):
    """What a peer is asked; see
    :class:`cinder_localstor.moves.answers.Answers`.
    """

    def identify(self, ctxt: context.RequestContext) -> list[str]:
        """Names and addresses of the node."""

    def examine(self, ctxt: context.RequestContext, block_size: int,
                portal: str, data_path: str = '') -> dict[str, Any]:
        """Whether a volume could move there."""

    def run(self, ctxt: context.RequestContext, move: dict[str, Any],
            steps: list[str]) -> None:
        """Run steps of a move."""

    def is_source_used(self, ctxt: context.RequestContext,
                       move: dict[str, Any]) -> bool:
        """Whether anybody has the handle of a move's source open."""

    def remaining(self, ctxt: context.RequestContext, names: list[str]
                  ) -> list[str]:
        """Which of some copies are there still."""

    def offer(self, ctxt: context.RequestContext, move_id: str, name: str,
              initiator: str,
              transports: Collection[str] = (interface.ISCSI,)
              ) -> dict[str, Any]:
        """What is to be known to copy a snapshot from there."""

    def delete_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                        snapshot_id: str) -> None:
        """Delete a snapshot that lies there."""

    def unmanage_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                          snapshot_id: str) -> None:
        """Let a snapshot go that lies there."""

    def drive(self, ctxt: context.RequestContext, move_id: str) -> None:
        """Look after a move now."""


class Endpoint:
    """Lets peers call these methods and no others.

    Every public method of an endpoint can be called from outside, so the one
    that answers is not an endpoint itself.
    """

    target = messaging.Target(version=VERSION)

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def identify(self, ctxt: context.RequestContext) -> list[str]:
        return self._answers.identify(ctxt)

    def examine(self, ctxt: context.RequestContext, block_size: int,
                portal: str, data_path: str = '') -> dict[str, Any]:
        return self._answers.examine(ctxt, block_size, portal, data_path)

    def run(self, ctxt: context.RequestContext, move: dict[str, Any],
            steps: list[str]) -> None:
        self._answers.run(ctxt, move, steps)

    def is_source_used(self, ctxt: context.RequestContext,
                       move: dict[str, Any]) -> bool:
        return self._answers.is_source_used(ctxt, move)

    def remaining(self, ctxt: context.RequestContext, names: list[str]
                  ) -> list[str]:
        return self._answers.remaining(ctxt, names)

    def offer(self, ctxt: context.RequestContext, move_id: str, name: str,
              initiator: str,
              transports: Collection[str] = (interface.ISCSI,)
              ) -> dict[str, Any]:
        return self._answers.offer(ctxt, move_id, name, initiator,
                                   transports)

    def delete_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                        snapshot_id: str) -> None:
        self._answers.delete_snapshot(ctxt, volume_id, snapshot_id)

    def unmanage_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                          snapshot_id: str) -> None:
        self._answers.unmanage_snapshot(ctxt, volume_id, snapshot_id)

    def drive(self, ctxt: context.RequestContext, move_id: str) -> None:
        self._answers.drive(ctxt, move_id)


def serve(host: str, answers: Answers) -> messaging.rpc.RPCServer:
    """Answer the peers from now on."""
    server = rpc.get_server(_target(host, VERSION), [Endpoint(answers)])
    server.start()
    return server


class PeerAPI:
    """Asks peers."""

    def __init__(self, host: str, timeout: float) -> None:
        """:param host: ``host@backend`` of this node
        :param timeout: seconds to wait for a sign of life
        """
        self.host = host
        self._timeout = timeout

    def _call(self, peer: str, volume_id: str, method: str, /,
              patient: bool, **arguments: Any) -> Any:
        """Ask a peer about a volume, see :meth:`_ask`."""
        return self._ask(peer, 'volume ' + volume_id, method, patient,
                         **arguments)

    def _ask(self, peer: str, about: str, method: str, patient: bool,
             version: str = FIRST_VERSION, **arguments: Any) -> Any:
        """:param about: what users and operators are told if it fails
        :param version: the first that has the method
        :raises PeerDown: no answer came; what was done is unknown
        :raises PeerFailed: the peer says that it failed
        """
        ctxt = context.get_admin_context()
        asked = ', '.join(arguments.get('steps', [method]))
        if not self.is_up(ctxt, peer):
            raise exception.PeerDown(peer=peer, about=about, host=self.host,
                                     reason='its service is down')
        client = rpc.get_client(_target(peer, version)).prepare(
            timeout=PATIENCE if patient else self._timeout,
            call_monitor_timeout=self._timeout if patient else None)
        try:
            return client.call(ctxt, method, **arguments)
        except messaging.MessagingTimeout as error:
            raise exception.PeerDown(
                peer=peer, about=about, host=self.host,
                reason='no answer in %d seconds' % self._timeout) from error
        except messaging.UnsupportedVersion as error:
            raise exception.PeerFailed(
                peer=peer, about=about, step=asked, reason=error,
                kind=UNSUPPORTED) from error
        except messaging.RemoteError as error:
            raise exception.PeerFailed(
                peer=peer, about=about, step=asked, kind=error.exc_type,
                reason=error.value) from error
        except messaging.MessagingException as error:
            raise exception.PeerDown(peer=peer, about=about, host=self.host,
                                     reason=error) from error
        except Exception as error:
            # Errors of Python and of Cinder come as themselves, in a class
            # that oslo.messaging makes up for them.
            raise exception.PeerFailed(
                peer=peer, about=about, step=asked, reason=error,
                kind=type(error).__name__.removesuffix('_Remote')) from error

    def is_up(self, ctxt: context.RequestContext, peer: str) -> bool:
        """Whether a peer's service counts as up."""
        services = objects.ServiceList.get_all(
            ctxt, {'host': peer, 'binary': 'cinder-volume'})
        return any(service.is_up for service in services)

    def identify(self, peer: str) -> list[str]:
        """Names and addresses of a peer's node."""
        return self._ask(peer, 'its names', 'identify', patient=False)

    def examine(self, peer: str, volume_id: str, block_size: int,
                portal: str, is_copy: bool = False, data_path: str = '',
                is_revert: bool = False) -> dict[str, Any]:
        """Whether a volume could move to a peer.

        :param is_copy: whether the peer has to know of copies, as the volume
            still arrives by one
        :param data_path: what the volume's type has in place of the peer's
            option, '' for nothing
        :param is_revert: whether it has to know of reverts, for the same
            reason
        """
        ask = functools.partial(self._call, peer, volume_id, 'examine',
                                patient=False, block_size=block_size,
                                portal=portal)
        if data_path:
            try:
                return ask(version=REVERTS if is_revert else WISHES,
                           data_path=data_path)
            except exception.PeerFailed as error:
                if error.kind != UNSUPPORTED:
                    raise
                LOG.warning('Volume %(volume)s moves to %(peer)s as that '
                            'likes: it does not know of %(path)s yet',
                            {'volume': volume_id, 'peer': peer,
                             'path': data_path})
        return ask(version=REVERTS if is_revert else COPIES if is_copy
                   else FIRST_VERSION)

    def run(self, peer: str, move: transfer.Transfer, steps: list[str],
            patient: bool = True) -> None:
        """Let a peer run steps of a move.

        :param patient: whether nobody waits, so that it may take long
        """
        self._call(peer, move.volume_id, 'run', patient=patient,
                   version=(REVERTS if move.replaced
                            else CLONES if move.cloned
                            else COPIES if move.is_copy else FIRST_VERSION),
                   move=move.as_dict(), steps=steps)

    def is_source_used(self, peer: str, move: transfer.Transfer) -> bool:
        """Whether anybody but the target has a source's handle open."""
        return self._call(peer, move.volume_id, 'is_source_used',
                          patient=False, move=move.as_dict())

    def remaining(self, peer: str, names: Collection[str]) -> set[str]:
        """Which of some copies a peer has still, or has not wiped yet."""
        try:
            return set(self._ask(
                peer, 'what is left of copies', 'remaining', patient=False,
                version='1.1', names=sorted(names)))
        except exception.PeerFailed as error:
            if error.kind != UNSUPPORTED:
                raise
            return set()

    def offer(self, peer: str, volume_id: str, move_id: str, name: str,
              initiator: str, transports: Collection[str], is_clone: bool,
              is_revert: bool = False) -> dict[str, Any]:
        """What is to be known to copy a snapshot from a peer, see
        :meth:`cinder_localstor.datapath.source.Source.offer`.

        :param is_clone: whether the peer has to take it first
        :param is_revert: whether a volume is reverted to it
        """
        ask = functools.partial(
            self._call, peer, volume_id, 'offer', patient=False,
            move_id=move_id, name=name, initiator=initiator)
        if interface.NVME in transports:
            try:
                return ask(version=TRANSPORTS, transports=list(transports))
            except exception.PeerFailed as error:
                if error.kind != UNSUPPORTED:
                    raise
        return ask(version=(CLONES if is_clone else REVERTS if is_revert
                            else COPIES))

    def delete_snapshot(self, peer: str, volume_id: str, snapshot_id: str
                        ) -> None:
        """Let a peer delete a snapshot that lies there."""
        self._call(peer, volume_id, 'delete_snapshot', patient=False,
                   version='1.2', volume_id=volume_id,
                   snapshot_id=snapshot_id)

    def unmanage_snapshot(self, peer: str, volume_id: str, snapshot_id: str
                          ) -> None:
        """Let a peer let a snapshot go that lies there."""
        self._call(peer, volume_id, 'unmanage_snapshot', patient=False,
                   version='1.6', volume_id=volume_id,
                   snapshot_id=snapshot_id)

    def nudge(self, peer: str, move_id: str) -> None:
        """Let a peer look after a move now; it would do so later anyway."""
        rpc.get_client(_target(peer, FIRST_VERSION)).cast(
            context.get_admin_context(), 'drive', move_id=move_id)
