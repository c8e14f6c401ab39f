# SPDX-License-Identifier: Apache-2.0
"""What the guests of instances have said of volumes, kept outside of them.

A guest judges its disks by what is on them, so it takes a disk that has gone
back to an earlier moment, or that is empty, for a good one.  Who remembers
what it has said before does not.
"""

from typing import Any

from lab import ledger as ledgers

# Of a volume's id a disk's serial has place for so many characters.
_SERIAL = 20


class Witness:
    """Remembers the stamps of volumes, and compares what is found later."""

    def __init__(self) -> None:
        # Reports by the console that they stand on
        self._heard: dict[str, list[dict[str, Any]]] = {}
        # Stamps on a disk that were durable, by its serial
        self._stamps: dict[str, int] = {}

    def hear(self, console: str, reports: list[dict[str, Any]]) -> int:
        """Take notice of what stands on a console; how many reports are new.

        :param console: which one: that of an instance on a node
        :param reports: all that stand there, see ``lab/guest``
        :raises StampError: a disk is wrong, or has less than it had
        """
        before = self._heard.get(console, [])
        if before[:len(reports)] == reports:
            return 0  # nothing new, or its end was lost with a node's power
        # A guest that boots, or comes to a node, has a new console.
        known = len(before) if reports[:len(before)] == before else 0
        self._heard[console] = reports
        for report in reports[known:]:
            self._judge(report)
        return len(reports) - known

    def forget(self, volume_id: str) -> None:
        """A volume gets other content."""
        self._stamps.pop(volume_id[:_SERIAL], None)

    def stamps(self, volume_id: str) -> int:
        """How many stamps a volume must have."""
        return self._stamps.get(volume_id[:_SERIAL], 0)

    def _judge(self, report: dict[str, Any]) -> None:
        serial = report.get('serial', '')
        if report['event'] == 'wrong':
            raise ledgers.StampError('volume %s... is wrong: %s' % (
                serial, report['why']))
        if report['event'] == 'found':
            found = sum(count or 0 for count in report['before'])
            if found < self.stamps(serial):
                raise ledgers.StampError(
                    'volume %s... has %d stamps, and had %d' % (
                        serial, found, self.stamps(serial)))
        if report['event'] == 'alive':
            self._stamps[serial] = max(self.stamps(serial),
                                       report['stamps'])
