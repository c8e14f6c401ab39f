# SPDX-License-Identifier: Apache-2.0
"""What came out: samples, their medians, and straight lines through them."""

from collections.abc import Iterable
import dataclasses
import statistics
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """Figures of one thing, once.

    :ivar key: of what was measured
    :ivar latency: milliseconds of the disk; None if it is not the lab's
    :ivar stack: name of what it was measured on
    :ivar load: of the machine, before: processes that run or want to
    """

    key: str
    latency: float | None
    stack: str
    round: int
    load: float
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Line:
    """latency = a + b * latency of the disk; `a` in seconds.

    `b` is the number of disk operations that have to wait for each other.
    """

    a: float
    b: float


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line that has the least squares, through seconds over seconds.

    :raises StatisticsError: there are not two different points
    """
    disks, seen = zip(*points)
    slope, intercept = statistics.linear_regression(disks, seen)
    return Line(intercept, slope)


class Results:
    """All samples of a run."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        # What was measured natively, and where all this was measured
        self.native: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}

    def values(self, key: str, stack: str, quantity: str,
               latency: float | None = None) -> list[float]:
        """One for each round."""
        return [sample.figures[quantity] for sample in self.samples
                if sample.key == key and sample.stack == stack
                and latency in (None, sample.latency)
                and quantity in sample.figures]

    def median(self, key: str, stack: str, quantity: str,
               latency: float | None = None) -> float | None:
        """Of all rounds; None if there was none."""
        values = self.values(key, stack, quantity, latency)
        return statistics.median(values) if values else None

    def latencies(self, key: str) -> list[float]:
        """The disks on which something was measured, in milliseconds."""
        return sorted({sample.latency for sample in self.samples
                       if sample.key == key and sample.latency is not None})

    def ratio(self, key: str, stack: str, quantity: str,
              latency: float | None = None, beside: str | None = None,
              to: str = 'raw') -> float | None:
        """To another stack: the median of what rounds say each by itself.

        What disturbs the machine disturbs neighbours in a round alike.
        """
        base = {(sample.round, sample.latency): sample.figures[quantity]
                for sample in self.samples
                if sample.key == (beside or key) and sample.stack == to
                and quantity in sample.figures}
        ratios = [
            sample.figures[quantity] / base[sample.round, sample.latency]
            for sample in self.samples
            if sample.key == key and sample.stack == stack
            and latency in (None, sample.latency)
            and quantity in sample.figures
            and base.get((sample.round, sample.latency))]
        return statistics.median(ratios) if ratios else None

    def line(self, key: str, stack: str, typical: bool = False
             ) -> Line | None:
        """Seconds of a request at depth 1, over those of the disk.

        :param typical: of the median request, as fio saw it, which other load
            on the machine stretches less; else of the mean with all that lies
            between two requests, which is what IOPS are made of
        """
        points = []
        for latency in self.latencies(key):
            value = self.median(key, stack, 'p50' if typical else 'iops',
                                latency)
            if value:
                points.append((latency / 1e3, value if typical
                               else 1 / value))
        return fit(points) if len(points) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """A form for JSON: every sample, and where it comes from."""
        return {'environment': self.environment, 'native': self.native,
                'failures': self.failures,
                'samples': [dataclasses.asdict(sample)
                            for sample in self.samples]}
