"""How every benchmark measures: interleaved sides, repeated, medians with their spread.

Machines are noisy and drift, so absolute times mean little. The sides that are compared run in turn,
A B A B ..., and a ratio is formed pair by pair before its median is taken.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass
class Report:
    """The figures of one benchmark.

    Attributes:
        name: The benchmark.
        samples: Every measured value of each figure.
        aims: What a figure should reach, as text such as `<= 1.5`.
        notes: What one must know to read the figures.
    """

    name: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    aims: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: str, values: Sequence[float], aim: str = "") -> None:
        """Add the measured values of a figure."""
        self.samples[figure] = list(values)
        if aim:
            self.aims[figure] = aim

    @property
    def figures(self) -> dict[str, float]:
        """Median of each figure."""
        return {name: _round(statistics.median(values)) for name, values in self.samples.items()}

    @property
    def spread(self) -> dict[str, dict[str, float]]:
        """Smallest and largest value of each figure, and how many there are."""
        return {
            name: {"min": _round(min(values)), "max": _round(max(values)), "count": len(values)}
            for name, values in self.samples.items()
        }

    def is_met(self, figure: str) -> bool | None:
        """Whether a figure reaches its aim; None without one."""
        aim = self.aims.get(figure)
        if aim is None:
            return None
        relation, bound = aim.split()
        value = self.figures[figure]
        return value <= float(bound) if relation == "<=" else value >= float(bound)

    def to_json(self) -> str:
        """One line for other programs."""
        content = {
            "bench": self.name,
            "figures": self.figures,
            "spread": self.spread,
            "aims": self.aims,
            "notes": self.notes,
            "machine": describe_machine(),
        }
        return json.dumps(content, allow_nan=False)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For a table: figure, median, spread, aim, met."""
        words = {True: "yes", False: "no", None: ""}
        return [
            (
                name,
                f"{self.figures[name]:g}",
                f"{self.spread[name]['min']:g} .. {self.spread[name]['max']:g} (n={len(values)})",
                self.aims.get(name, ""),
                words[self.is_met(name)],
            )
            for name, values in self.samples.items()
        ]


def interleave(
    sides: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Measure several sides in turn.

    Args:
        sides: Each measures once and returns the value.
        repeats: Counted rounds; in every other round the order is reversed.
        warmup: Rounds before that are thrown away.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warmup + repeats):
        order = list(sides)[:: 1 if index % 2 == 0 else -1]
        for name in order:
            value = sides[name]()
            if index >= warmup:
                values[name].append(value)
    return values


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair-by-pair ratios of two interleaved sides."""
    return [a / b for a, b in zip(above, below, strict=True)]


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "num_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_before": round(load, 2),
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")
