"""Who gets which part of every global batch, why, and what a step will take.

The plan is a pure function of the configuration, so every worker makes the same one, and `labkit plan` shows
what `labkit run` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.cluster.cost import exposed_s, payload_rate
from labkit.cluster.device_model import DeviceModel
from labkit.cluster.groups import Grouping, LinkModel, group_workers, predict_groups
from labkit.cluster.partition import Partition, partition, split_batch
from labkit.config import AsyncConfig, ClusterConfig, ExperimentConfig, HybridConfig, WorkerConfig
from labkit.errors import ConfigError

Origin = Literal["given", "planned", "even"]

_FAST_MBIT = 100_000.0  # for links of which nothing is known
_LEAST_GAIN_OF_A_GROUP = 0.05  # less is within what a probe can tell


@dataclass(frozen=True)
class Plan:
    """The split of a global batch.

    Attributes:
        local_batch_sizes: Samples of each worker, summing to the global batch; shape (W,).
        micro_batch_sizes: Largest micro-step of each worker; None: all its samples at once; shape (W,).
        origin: given by the cluster file, planned from profiles, or even for lack of them.
        devices: What is known of the devices; None unless all have a profile.
        groups: Ranks of each group that synchronises every step together; one of all but under the
            asynchronous strategies.
        why_groups: Why these groups, in a few lines; "" for one.
    """

    local_batch_sizes: tuple[int, ...]
    micro_batch_sizes: tuple[int | None, ...]
    origin: Origin
    devices: tuple[DeviceModel, ...] | None
    groups: tuple[tuple[int, ...], ...] = ()
    why_groups: str = ""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each group's push; shape (G,)."""
        return tuple(sum(self.local_batch_sizes[rank] for rank in group) for group in self.groups)

    @property
    def partition(self) -> Partition | None:
        """What the split is predicted to cost; None unless all workers have a profile."""
        return Partition(self.devices, self.local_batch_sizes) if self.devices else None


@dataclass(frozen=True)
class Prediction:
    """What a step under a plan will take.

    Attributes:
        compute_s: Of the slowest worker.
        exposed_s: Communication that nothing hides; under an asynchronous strategy what the links are slower
            than computing.
        samples_per_s: Of all workers together.
        limit_samples_per_s: The sum of the devices' own speeds.
        equal_split_s: Step time with the same batch for all.
    """

    compute_s: float
    exposed_s: float
    samples_per_s: float
    limit_samples_per_s: float
    equal_split_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.exposed_s


def predict(config: ExperimentConfig, plan: Plan) -> Prediction | None:
    """Predict a step; None unless all workers have a profile."""
    split = plan.partition
    if split is None:
        return None
    compute_s, equal_s = split.step_time_s, split.equal_split_step_time_s
    if isinstance(config.sync, AsyncConfig):
        exposed = _async_step_s(config, plan, split) - compute_s
    else:
        exposed = exposed_s(config, compute_s)
    return Prediction(
        compute_s,
        exposed,
        split.global_batch_size / (compute_s + exposed),
        split.limit_samples_per_s,
        equal_s + (0.0 if isinstance(config.sync, AsyncConfig) else exposed_s(config, equal_s)),
    )


def _async_step_s(config: ExperimentConfig, plan: Plan, split: Partition) -> float:
    """Seconds in which groups that do not wait for each other get through a global batch."""
    nodes, link = _network(config.cluster)
    grouping = predict_groups(plan.groups, split.devices, nodes, split.global_batch_size, link)
    return split.global_batch_size / _rate(grouping, split.devices, split.local_batch_sizes)


def _network(cluster: ClusterConfig) -> tuple[list[int], LinkModel]:
    """The node of each worker, and what is known of the links."""
    nodes = [index for index, node in enumerate(cluster.nodes) for _ in node.workers]
    return nodes, LinkModel(cluster.gradient_bytes or 1, payload_rate(cluster) or _FAST_MBIT)


def workers_of(cluster: ClusterConfig) -> list[WorkerConfig]:
    """All workers, by rank."""
    return [worker for node in cluster.nodes for worker in node.workers]


def devices_of(config: ExperimentConfig) -> tuple[DeviceModel, ...] | None:
    """The workers' device models by rank; None unless all have a profile."""
    workers = workers_of(config.cluster)
    found = []
    for worker in workers:
        if worker.profile is None:
            return None
        limits = [worker.profile.max_micro_batch_size, config.engine.micro_batch_size]
        found.append(
            DeviceModel(
                worker.profile.alpha_s,
                worker.profile.beta_s,
                max_micro_batch_size=min((limit for limit in limits if limit), default=None),
                max_batch_size=worker.max_batch_size,
            )
        )
    return tuple(found)


def capped_devices(config: ExperimentConfig) -> tuple[DeviceModel, ...]:
    """Devices of which only the limits are known, all equally fast; by rank."""
    return tuple(
        DeviceModel(0.0, 1.0, max_batch_size=worker.max_batch_size) for worker in workers_of(config.cluster)
    )


def make_plan(config: ExperimentConfig) -> Plan:
    """Split the global batch, and for an asynchronous strategy the workers, as the configuration says.

    Raises:
        ConfigError: a planned split is wanted without profiles, the workers' limits sum to less than the
            global batch, or a group would get no sample.
    """
    workers, devices = workers_of(config.cluster), devices_of(config)
    micro = tuple(_micro_batch_size(worker, config.engine.micro_batch_size) for worker in workers)
    sizes, origin = _split(config, workers, devices)
    groups, why = _groups(config, devices, sizes)
    plan = Plan(tuple(sizes), micro, origin, devices, groups, why)
    for group, share in zip(groups, plan.shares, strict=True):
        if share == 0:
            raise ConfigError(
                f"every group must get at least one sample, got none for {list(group)}. Raise "
                "engine.global_batch_size, or leave these workers out of the cluster."
            )
    return plan


def _split(
    config: ExperimentConfig, workers: Sequence[WorkerConfig], devices: tuple[DeviceModel, ...] | None
) -> tuple[Sequence[int], Origin]:
    total = config.engine.global_batch_size
    given = [worker.local_batch_size for worker in workers if worker.local_batch_size is not None]
    if given:
        return given, "given"
    if config.shares.name == "planned" and devices is None:
        rank = next(rank for rank, worker in enumerate(workers) if worker.profile is None)
        raise ConfigError(
            f"cluster must have a profile of every worker with shares.name 'planned', got none of worker "
            f"{rank}. Run `labkit probe` first, or use shares.name=even."
        )
    if devices is None or config.shares.name == "even":
        return _even(workers, total), "even"
    return partition(devices, total).local_batch_sizes, "planned"


def _groups(
    config: ExperimentConfig, devices: tuple[DeviceModel, ...] | None, sizes: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Who synchronises with whom."""
    sync, num_workers = config.sync, config.cluster.num_workers
    if not isinstance(sync, AsyncConfig):
        return (tuple(range(num_workers)),), ""
    if sync.groups is not None:
        return sync.groups, "groups are given"
    if not isinstance(sync, HybridConfig):
        return tuple((rank,) for rank in range(num_workers)), f"{sync.name}: every worker for itself"
    nodes, link = _network(config.cluster)
    if devices is None:
        found = tuple(
            tuple(rank for rank in range(num_workers) if nodes[rank] == node)
            for node in range(max(nodes) + 1)
        )
        return found, "every node is a group, since not every worker has a profile"
    total = config.engine.global_batch_size
    like = group_workers(devices, nodes, total, link, min_gain=_LEAST_GAIN_OF_A_GROUP)
    alone = predict_groups([[rank] for rank in range(num_workers)], devices, nodes, total, link)
    # Like workers belong together, unless the links can't carry their sums beside the servers' traffic.
    if _rate(like, devices, sizes) * (1 + _LEAST_GAIN_OF_A_GROUP) < _rate(alone, devices, sizes):
        return alone.groups, f"every worker for itself: links are too slow for groups\n{alone.explain()}"
    return like.groups, like.explain()


def _rate(grouping: Grouping, devices: Sequence[DeviceModel], sizes: Sequence[int]) -> float:
    """Samples/s of groups with these local batches, traffic hidden behind computing as far as it goes."""
    rate = 0.0
    for ranks, sync_s in zip(grouping.groups, grouping.sync_s, strict=True):
        compute_s = max(devices[rank].time_s(sizes[rank]) for rank in ranks)
        busy_s = max(compute_s, sync_s + grouping.server_s)
        rate += sum(sizes[rank] for rank in ranks) / busy_s if busy_s > 0 else 0.0
    return rate


def _micro_batch_size(worker: WorkerConfig, wanted: int | None) -> int | None:
    limits = [wanted, worker.profile.max_micro_batch_size if worker.profile else None]
    return min((limit for limit in limits if limit), default=None)


def _even(workers: Sequence[WorkerConfig], total: int) -> list[int]:
    sizes = split_batch(total, [1] * len(workers))
    for rank, (size, worker) in enumerate(zip(sizes, workers, strict=True)):
        if worker.max_batch_size is not None and size > worker.max_batch_size:
            raise ConfigError(
                f"max_batch_size of worker {rank} must be at least its even share of {size} samples, got "
                f"{worker.max_batch_size}. Run `labkit probe`, so that shares can be planned, or raise it."
            )
    return sizes
