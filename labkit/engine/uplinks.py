"""The link between a worker's device and its host: who else is behind it, and what it brings through.

It is what the cluster file says, or what `labkit probe --links` measured and wrote there; on CUDA, who shares
a link is read from the PCI tree. On CPUs a link of the cluster file is emulated.
"""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.cluster.placement import Placement
from labkit.config import ClusterConfig, UplinkConfig
from labkit.memory.adapter import Adapter, CpuAdapter, CudaAdapter, TurnsCudaAdapter
from labkit.memory.turns import EmulatedLink, LinkState, open_state
from labkit.memory.uplink import Uplink, groups_behind_bridges
from labkit.runfolder import RunFolder

_SYSFS = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class OwnUplink:
    """Where a worker's device hangs.

    Attributes:
        index: Which uplink of its node.
        local_ranks: Workers behind it.
        given: As the cluster file says, to be emulated on CPUs; None: it says nothing.
        measured: As a probe measured it; None: it was not.
        carries_gradients: Gradients between workers take the same way.
    """

    index: int
    local_ranks: tuple[int, ...]
    given: Uplink | None = None
    measured: Uplink | None = None
    carries_gradients: bool = False

    @property
    def known(self) -> Uplink | None:
        """To plan with: measured before given."""
        return self.measured or self.given

    @property
    def ways_in_turns(self) -> frozenset[str]:
        """Directions in which more comes through when those behind it take turns."""
        known = self.known
        if known is None or len(self.local_ranks) < 2:
            return frozenset()
        return frozenset(way for way in ("out", "in") if known.falls(way))


def uplink_of(cluster: ClusterConfig, placement: Placement, device: torch.device) -> OwnUplink:
    """The uplink of a worker's device."""
    node = cluster.nodes[placement.node_index]
    everybody = tuple(range(placement.local_world_size))
    measured = [link for link in cluster.measured_uplinks if link.node == node.name]
    given = _link_of(placement, node.uplinks)
    found = _link_of(placement, measured)
    if given is not None:
        ranks, index = given.behind(len(everybody)), node.uplinks.index(given)
    else:
        ranks = _detected(placement, everybody) if device.type == "cuda" else everybody
        index = len(node.uplinks) + min(ranks)
    return OwnUplink(
        index,
        ranks,
        None if given is None else _uplink(given),
        None if found is None else _uplink(found),
        any(link.carries_gradients for link in (given, found) if link is not None),
    )


def _link_of(placement: Placement, links: Sequence[UplinkConfig]) -> UplinkConfig | None:
    return next((x for x in links if placement.local_rank in x.behind(placement.local_world_size)), None)


def _uplink(config: UplinkConfig) -> Uplink:
    return Uplink(
        tuple(map(float, config.out_rates)),
        tuple(map(float, config.in_rates)),
        tuple(map(float, config.both_out_rates)),
        tuple(map(float, config.both_in_rates)),
        config.latency_s,
    )


def _detected(placement: Placement, everybody: tuple[int, ...]) -> tuple[int, ...]:
    """Workers whose GPUs hang below the same port of the PCI tree, by their place on the node."""
    paths = []
    for rank in everybody[: torch.cuda.device_count()]:
        address = _pci_address(rank)
        if address is None:
            return (placement.local_rank,)
        paths.append(str((_SYSFS / address).resolve()))
        if not Path(paths[-1]).exists():  # a container without the tree
            return (placement.local_rank,)
    for group in groups_behind_bridges(paths):
        if placement.local_rank in group:
            return tuple(group)
    return (placement.local_rank,)


def _pci_address(device_index: int) -> str | None:
    """Where a CUDA device is plugged in, as `0000:17:00.0`, by the driver; None when it does not say."""
    driver = ctypes.CDLL("libcuda.so.1")
    text, device = ctypes.create_string_buffer(16), ctypes.c_int()
    codes = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), device_index),
        driver.cuDeviceGetPCIBusId(text, len(text), device),
    )
    return None if any(codes) else text.value.decode().lower()


def make_adapter(
    uplink: OwnUplink,
    placement: Placement,
    device: torch.device,
    folder: RunFolder,
    ways: Collection[str] = (),
) -> Adapter:
    """What copies over a worker's uplink, emulated on CPUs where the cluster file describes it.

    Args:
        uplink: The worker's.
        placement: The worker.
        device: Its device.
        folder: Where the workers behind the uplink find each other.
        ways: Directions in which they take turns.
    """
    is_emulated = device.type == "cpu" and uplink.given is not None
    state = None
    if ways or is_emulated:
        fd = open_state(folder.link_file(placement.node, uplink.index))
        state = LinkState(fd, uplink.local_ranks.index(placement.local_rank))
    if device.type == "cuda":
        return TurnsCudaAdapter(device, state, ways) if state is not None else CudaAdapter(device)
    pace = None
    if is_emulated and state is not None and uplink.given is not None:
        pace = EmulatedLink(uplink.given, state)
    return CpuAdapter(pace, state, ways)
