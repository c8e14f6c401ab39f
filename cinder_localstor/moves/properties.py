# SPDX-License-Identifier: Apache-2.0
"""What a volume's type says of its moves, by extra specs of ours.

They are read when they are needed and kept nowhere: a volume that gets another
type while it arrives heeds that at its next period.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
from typing import Any

from cinder import context
from oslo_config import cfg
from oslo_log import log as logging
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor import opts
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

VENDOR = 'localstor'
PREFIX = VENDOR + ':'
DATA_PATH = PREFIX + 'data_path'
HYDRATION_RATE = PREFIX + 'hydration_rate'
HYDRATION_MIN_RATE = PREFIX + 'hydration_min_rate'


@dataclasses.dataclass(frozen=True)
class Property:
    """An extra spec that a volume type may have.

    :ivar option: the driver's that it stands for, of the same values
    """

    title: str
    description: str
    option: cfg.Opt

    def described(self) -> dict[str, Any]:
        """What Cinder's API says of it."""
        told = {'title': self.title, 'description': self.description}
        kind: Any = self.option.type
        if isinstance(self.option, cfg.IntOpt):
            return {**told, 'type': 'integer', 'minimum': kind.min}
        return {**told, 'type': 'string', 'enum': list(kind.choices)}


def _like(name: str, title: str, description: str) -> Property:
    found, = (opt for opt in opts.LOCALSTOR_OPTS if opt.name == name)
    return Property(title, description, found)


PROPERTIES = {
    DATA_PATH: _like(
        'localstor_data_path', 'Data path',
        'What serves a volume while it arrives, in place of the option '
        'localstor_data_path of the node that it arrives at.'),
    HYDRATION_RATE: _like(
        'localstor_hydration_rate', 'Hydration rate',
        'How many MiB per second of a volume arrive at most. 0 sets no limit; '
        'its share of localstor_hydration_rate is one still. dm-clone does '
        'not heed it.'),
    HYDRATION_MIN_RATE: _like(
        'localstor_hydration_min_rate', 'Least hydration rate',
        'How many MiB per second of a volume arrive whatever its guest does, '
        'in place of the option localstor_hydration_min_rate. dm-clone does '
        'not heed it.'),
}


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a volume's type wants of its moves.

    :ivar data_path: a value of the option localstor_data_path, '' for what
        that says
    :ivar rate: bytes per second that arrive at most, None for no limit
    :ivar minimum: bytes per second that arrive at least, None for what the
        option localstor_hydration_min_rate says
    """

    data_path: str = ''
    rate: int | None = None
    minimum: int | None = None


NONE = Wishes()


def check(type_name: str, specs: Mapping[str, str]) -> None:
    """Refuse a volume type that says what the driver can't do.

    :param specs: all its extra specs
    :raises WrongProperty: one of ours is unknown, or of a wrong value
    """
    try:
        _read(specs)
    except ValueError as error:
        raise exception.WrongProperty(volume_type=type_name,
                                      reason=error) from None


def _read(specs: Mapping[str, str]) -> Wishes:
    """:raises ValueError: one is unknown, or of a wrong value"""
    values: dict[str, Any] = {}
    for key, value in sorted(specs.items()):
        if not key.startswith(PREFIX):
            continue
        if key not in PROPERTIES:
            raise ValueError('there is no %s, but there are %s' % (
                key, ', '.join(sorted(PROPERTIES))))
        try:
            values[key] = PROPERTIES[key].option.type(value)
        except ValueError as error:
            raise ValueError('%s=%s: %s' % (key, value, error)) from None
    rate = values.get(HYDRATION_RATE, 0)
    minimum = values.get(HYDRATION_MIN_RATE)
    if rate and minimum and rate < minimum:
        raise ValueError('%s=%d is less than %s=%d' % (
            HYDRATION_RATE, rate, HYDRATION_MIN_RATE, minimum))
    return Wishes(
        data_path=values.get(DATA_PATH, ''), rate=rate * units.Mi or None,
        minimum=None if minimum is None else minimum * units.Mi)


def check_volume(ctxt: context.RequestContext, volume_id: str) -> None:
    """As :func:`check`, of the type of a volume."""
    for name, specs in rows.types_of(ctxt, {volume_id}, PREFIX).values():
        check(name, specs)


def of_volume(ctxt: context.RequestContext, volume_id: str) -> Wishes:
    """What the type of a volume wants."""
    return of_volumes(ctxt, {volume_id}).get(volume_id, NONE)


def of_volumes(ctxt: context.RequestContext, volume_ids: Collection[str]
               ) -> dict[str, Wishes]:
    """What the types of volumes want, of those whose types want anything.

    A type that is wrong, as one from before the driver knew of properties may
    be, is logged, and not heeded: an instance shall get its volume all the
    same.
    """
    found: dict[str, Wishes] = {}
    for volume_id, (name, specs) in rows.types_of(ctxt, volume_ids,
                                                  PREFIX).items():
        try:
            found[volume_id] = _read(specs)
        except ValueError as error:
            LOG.warning('Volume type %(type)s of volume %(volume)s is not '
                        'heeded: %(error)s', {
                            'type': name, 'volume': volume_id,
                            'error': error})
    return found
