# SPDX-License-Identifier: Apache-2.0
"""What a user of a chaos run has beside what he uses, and wants no more."""

from collections.abc import Collection
import time
from typing import Any

from keystoneauth1 import exceptions

from lab import journal as journals
from lab import user as users

# Seconds in which something has to become what it should
PATIENCE = 240


class RestError(Exception):
    """Something is not removed, and nothing excuses it."""


class Rest:
    """The volumes and snapshots with a user's name that he does not use.

    Copies that nobody heard of among them, because a fault took the answer.
    """

    def __init__(self, name: str, user: users.User,
                 journal: journals.Journal) -> None:
        self._prefix = name + '-'
        self._user = user
        self._journal = journal
        # Since when which of them is not removed
        self._since: dict[str, float] = {}

    def remove(self, wanted: Collection[str]) -> bool:
        """Ask for the deletion of all but these volumes and snapshots.

        :returns: whether there was nothing left to ask for
        :raises RestError: something stays though nothing goes wrong
        """
        snapshots = [row for row in self._user.snapshots_in_detail()
                     if self._is_unwanted(row, wanted)]
        for row in snapshots:
            self._remove_snapshot(row)
        volumes = [row for row in self._user.volumes()
                   if self._is_unwanted(row, wanted)
                   and not (row['migration_status'] or '').startswith(
                       'target:')]
        kept = {row['volume_id'] for row in snapshots}
        for row in volumes:
            if row['id'] not in kept:
                self._remove_volume(row)
        there = {row['id'] for row in snapshots + volumes}
        self._since = {one: since for one, since in self._since.items()
                       if one in there}
        return not there

    def _is_unwanted(self, row: dict[str, Any], wanted: Collection[str]
                     ) -> bool:
        return (row['id'] not in wanted
                and (row['name'] or '').startswith(self._prefix))

    def _remove_snapshot(self, row: dict[str, Any]) -> None:
        self._see('snapshot', row)
        if row['status'] in ('available', 'error', 'error_deleting'):
            if row['status'] == 'error_deleting':
                self._user.reset_snapshot(row['id'], 'available')
            self._ask(lambda: self._user.request_snapshot_deletion(row['id']))

    def _remove_volume(self, row: dict[str, Any]) -> None:
        self._see('volume', row)
        if row['status'] == 'in-use':
            for attachment in self._user.attachments(row['id']):
                self._user.remove_attachment(attachment)
        elif row['status'] in ('available', 'error', 'error_deleting'):
            if row['status'] == 'error_deleting':
                self._user.reset(row['id'], 'available')
            self._ask(lambda: self._user.request_deletion(row['id']))

    def _see(self, kind: str, row: dict[str, Any]) -> None:
        """:raises RestError: it has been seen for too long"""
        start = self._since.setdefault(row['id'], time.monotonic())
        disturbed = self._journal.disturbed(start)
        if row['status'].startswith('error'):
            self._journal.count('mended by hand')
        elif time.monotonic() < start + PATIENCE:
            return
        elif row['status'] in ('creating', 'deleting') and disturbed:
            # Its service died when it had hardly heard of it.
            self._journal.count('mended by hand')
            if kind == 'volume':
                self._user.reset(row['id'], 'error')
            else:
                self._user.reset_snapshot(row['id'], 'error')
        if not disturbed:
            raise RestError('%s %s, which is not wanted, stays %s' % (
                kind, row['id'], row['status']))

    @staticmethod
    def _ask(request: Any) -> None:
        """Ask for a deletion that may be refused as long as others go on."""
        try:
            request()
        except (exceptions.BadRequest, exceptions.NotFound):
            pass
