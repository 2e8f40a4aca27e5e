"""A link to the host that several devices share, as its measured rates describe it. No torch here.

What k devices bring through together need not be k times as much as one does, nor even as much: two numbers,
the rate of a link and its share, do not say it, so the whole curve is kept.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from labkit.memory.profile import Link

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_FALLS = 0.9  # of what one device alone brings through


@dataclass(frozen=True)
class Uplink:
    """What devices behind one link bring through it together.

    Attributes:
        out_rates: Bytes a second from the devices when 1, 2, ... of them copy at once; shape (k,).
        in_rates: To the devices, likewise.
        both_out_rates: From the devices while as many copy the other way; empty: as `out_rates`.
        both_in_rates: To the devices while as many copy the other way; empty: as `in_rates`.
        latency_s: Of one copy.
    """

    out_rates: tuple[float, ...]
    in_rates: tuple[float, ...]
    both_out_rates: tuple[float, ...] = ()
    both_in_rates: tuple[float, ...] = ()
    latency_s: float = 0.0

    @classmethod
    def ideal(cls, out_bytes_per_s: float, in_bytes_per_s: float | None = None) -> "Uplink":
        """One that brings the same through for any number of devices, both ways at once."""
        back = out_bytes_per_s if in_bytes_per_s is None else in_bytes_per_s
        return cls((out_bytes_per_s,), (back,))

    def rate(self, direction: str, num_same: int, num_other: int = 0) -> float:
        """Bytes a second of all copies of a direction together.

        Args:
            direction: `out` or `in`.
            num_same: Devices that copy that way, 1 or more. The last rate holds for more than were measured.
            num_other: Devices that copy the other way.
        """
        alone, beside = (
            (self.out_rates, self.both_out_rates)
            if direction == "out"
            else (self.in_rates, self.both_in_rates)
        )
        curve = beside if num_other and beside else alone
        return curve[min(num_same, len(curve)) - 1]

    def share(self, num_devices: int) -> Link:
        """What each has when so many copy at once, one way at a time as training mostly does."""
        return Link(
            self.rate("out", num_devices) / num_devices,
            self.rate("in", num_devices) / num_devices,
            self.latency_s,
        )

    def falls(self, direction: str) -> bool:
        """Less comes through when several copy at once than from one alone: then they should take turns."""
        curve = self.out_rates if direction == "out" else self.in_rates
        return min(curve) < _FALLS * curve[0]

    def in_turns(self) -> "Uplink":
        """What comes through when devices take turns where that helps."""
        out = self.out_rates[:1] if self.falls("out") else self.out_rates
        back = self.in_rates[:1] if self.falls("in") else self.in_rates
        return replace(self, out_rates=out, in_rates=back)


def groups_behind_bridges(paths: Sequence[str]) -> list[list[int]]:
    """Devices that share a link, from where they hang in the PCI tree.

    Devices below the same port of a root complex share its lanes, through however many switches.

    Args:
        paths: Of each device under `/sys/devices`, as `/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0`.

    Returns:
        Indices of devices, in order of their first one.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, path in enumerate(paths):
        parts = PurePosixPath(path).parts
        roots = [place for place, part in enumerate(parts) if _ROOT.fullmatch(part)]
        # The root complex and the first port below it; a device right at the root has a port of its own.
        port = parts[: roots[0] + 2] if roots else parts
        groups.setdefault(port, []).append(index)
    return list(groups.values())
