"""Measure what links between devices and their host bring through when 1, 2, ... devices copy at once.

The workers behind a link begin together, from one to all of them, out, in, and both ways; all links at the
same time. Event of the first worker behind each link, beside `start` and `end`:

    uplink  node, workers, out_rates, in_rates, both_out_rates, both_in_rates, latency_s
"""

import contextlib
import time

import torch

from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import ExperimentConfig
from labkit.engine.events import EventLog
from labkit.engine.uplinks import make_adapter, uplink_of
from labkit.memory.adapter import Adapter, Copy
from labkit.memory.arena import HostArena, NoRoom
from labkit.runfolder import RunFolder

_TRIAL_BYTES = 2**20
_MOST_BYTES = 2**26
_LEAST_BYTES = 2**18
_COPY_S = 0.02  # of one copy, about
_MEASURE_S = 0.3  # so long that bursts through an emulated link do not count
_WARM_UP_S = 0.1
_NUM_PINGS = 20
_WAYS: tuple[tuple[str, ...], ...] = (("out",), ("in",), ("out", "in"))


def probe_uplinks(
    config: ExperimentConfig,
    placement: Placement,
    comm: Communicator,
    log: EventLog,
    folder: RunFolder,
    device: torch.device,
) -> None:
    """Measure this worker's link with the others behind it."""
    uplink = uplink_of(config.cluster, placement, device)
    own = torch.tensor([placement.node_index, uplink.index, len(uplink.local_ranks)], device=device)
    links = [tuple(map(int, link)) for link in comm.gather(own)]
    most = max(num_devices for *_, num_devices in links)
    log.start(placement, str(device), num_params=0, gradient_bytes=0, total_steps=most, start_step=0)
    place = uplink.local_ranks.index(placement.local_rank)
    found: dict[str, list[int]] = {
        name: [] for name in ("out_rates", "in_rates", "both_out_rates", "both_in_rates")
    }
    with contextlib.closing(_Copier(make_adapter(uplink, placement, device, folder), device)) as copier:
        latency_s = copier.latency_s()
        for num_devices in range(1, most + 1):
            for ways in _WAYS:
                comm.barrier()
                rates = copier.rates(ways, num_devices) if place < num_devices else (0.0, 0.0)
                every = comm.gather(torch.tensor(rates, dtype=torch.float64, device=device))
                together = [rate for rate, link in zip(every, links, strict=True) if link == links[comm.rank]]
                if num_devices > len(uplink.local_ranks):
                    continue  # of another link, which has more
                sums = dict(zip(("out", "in"), torch.stack(together).sum(0).tolist(), strict=True))
                for way in ways:
                    found[f"both_{way}_rates" if len(ways) == 2 else f"{way}_rates"].append(round(sums[way]))
            if comm.rank == 0:
                log.write("metrics", step=num_devices, epoch=0.0, samples=0, values={})
    if place == 0:
        workers = list(uplink.local_ranks)
        log.write("uplink", node=placement.node, workers=workers, latency_s=round(latency_s, 7), **found)
    log.write("end", step=most)


class _Copier:
    """Copies back and forth as fast as it goes."""

    def __init__(self, adapter: Adapter, device: torch.device) -> None:
        self._adapter, self._device = adapter, device
        tier = "pinned" if device.type == "cuda" else "ram"
        self._size_bytes = _TRIAL_BYTES
        try:
            self._arena = HostArena(4 * _MOST_BYTES, tier)
        except NoRoom:
            self._arena = HostArena(4 * _MOST_BYTES, "ram")
        self._host = {way: self._arena.take(2 * _MOST_BYTES) for way in ("out", "in")}
        self._own = {
            way: torch.zeros(2 * _MOST_BYTES, dtype=torch.uint8, device=device) for way in ("out", "in")
        }

    def _copy(self, way: str, size_bytes: int, part: int = 0) -> Copy:
        host = self._host[way]
        assert host is not None
        span = slice(part * _MOST_BYTES, part * _MOST_BYTES + size_bytes)
        if way == "out":
            return self._adapter.copy_out(self._own[way][span], host[span])
        return self._adapter.copy_in(host[span], self._own[way][span], None)

    @staticmethod
    def _finish(copy: Copy) -> None:
        while not copy.is_done():
            time.sleep(0)

    def latency_s(self) -> float:
        """Of the smallest copy; and find a size that takes a good while."""
        times = []
        for _ in range(_NUM_PINGS):
            began_at = time.perf_counter()
            self._finish(self._copy("in", 8))
            times.append(time.perf_counter() - began_at)
        began_at = time.perf_counter()
        for _ in range(4):
            self._finish(self._copy("out", _TRIAL_BYTES))
        each_s = (time.perf_counter() - began_at) / 4
        self._size_bytes = int(min(_MOST_BYTES, max(_LEAST_BYTES, _TRIAL_BYTES * _COPY_S / each_s)))
        return min(times)

    def rates(self, ways: tuple[str, ...], num_devices: int) -> tuple[float, float]:
        """Bytes a second out and in, of copies that never pause.

        Args:
            ways: Directions.
            num_devices: That share the link: copies are smaller, so that many arrive in the time.
        """
        size_bytes = max(_LEAST_BYTES, self._size_bytes // (num_devices * len(ways)))
        under_way = {way: [self._copy(way, size_bytes, part) for part in (0, 1)] for way in ways}
        done = dict.fromkeys(("out", "in"), 0)
        part = dict.fromkeys(("out", "in"), 0)
        counted_from = time.perf_counter() + _WARM_UP_S
        first_at: dict[str, float] = {}
        last_at: dict[str, float] = {}
        while time.perf_counter() < counted_from + _MEASURE_S:
            for way, copies in under_way.items():
                if not copies[0].is_done():
                    continue
                now = time.perf_counter()
                if now >= counted_from:  # from one arrival to another, so that no part of a copy counts
                    done[way] += size_bytes if way in first_at else 0
                    first_at.setdefault(way, now)
                    last_at[way] = now
                copies.pop(0)
                copies.append(self._copy(way, size_bytes, part[way]))
                part[way] = 1 - part[way]
            time.sleep(1e-4)
        for copies in under_way.values():
            for copy in copies:
                self._finish(copy)
        seconds = {way: last_at[way] - first_at[way] for way in first_at}
        out, back = (done[way] / seconds[way] if seconds.get(way) else 0.0 for way in ("out", "in"))
        return out, back

    def close(self) -> None:
        """Let go of memory and threads."""
        self._adapter.close()
        self._host.clear()
        self._arena.close()
