"""What a strategy must send, and how long that takes at the least: closed forms, checked against counters."""

from labkit.config import (
    AllReduceConfig,
    AsyncConfig,
    ClusterConfig,
    ExperimentConfig,
    HierarchicalConfig,
    LocalSgdConfig,
    ParameterServerConfig,
)

PAYLOAD_SHARE = 0.956
"""Part of a link's rate that TCP can use: 1448 of the 1514 bytes of a full Ethernet frame."""

CHUNK_BYTES = 2**20
"""Gradient bytes that travel together, where nothing says otherwise."""

_LEAST_CHUNK_BYTES = 2**18

FORWARD_SHARE = 1 / 3
"""Of a pass: the backward pass does two matrix products for each one of the forward pass."""


def sent_bytes(config: ExperimentConfig, model_bytes: float, num_steps: int | None = None) -> list[float]:
    """Bytes that each node sends over its link per step, by the strategy's formula.

    N nodes, W workers, R of them on a node, M bytes of gradients: `hierarchical` 2 (N-1)/N M (half of it in
    bfloat16), `allreduce` 2 (W-1)/W M, since its ring passes every node once; `parameter_server` R M from
    every node but the server's, which sends W - R models; `local_sgd` what `allreduce` sends, for parameters
    and averaged momentum, once every period. With a server on every node, a group pushes and pulls (N-1)/N M
    over links; which groups there are is known when they are given, else every worker counts as one.

    Args:
        config: Strategy, cluster and optimizer.
        model_bytes: Bytes of all gradients in the type of the parameters.
        num_steps: Steps of a run that may end inside a period of `local_sgd`; default: many.

    Returns:
        One number for each node; shape (N,).
    """
    counts = [len(node.workers) for node in config.cluster.nodes]
    num_nodes, num_workers, sync = len(counts), sum(counts), config.sync
    if num_nodes == 1:
        return [0.0]
    if isinstance(sync, ParameterServerConfig):
        return [model_bytes * (num_workers - counts[0]), *(model_bytes * count for count in counts[1:])]
    if isinstance(sync, HierarchicalConfig):
        width = 0.5 if sync.wire == "bfloat16" else 1.0
        return [2 * (num_nodes - 1) / num_nodes * model_bytes * width] * num_nodes
    if isinstance(sync, AsyncConfig):
        return _server_bytes(config, model_bytes)
    ring_bytes = 2 * (num_workers - 1) / num_workers * model_bytes
    if isinstance(sync, LocalSgdConfig):
        steps = num_steps or sync.period_steps
        ring_bytes *= (1 + _num_averaged_states(config, sync)) * (steps // sync.period_steps) / steps
    return [ring_bytes] * num_nodes


def _server_bytes(config: ExperimentConfig, model_bytes: float) -> list[float]:
    """Every group pushes to the servers of other nodes, and every server answers the pulls of other nodes."""
    assert isinstance(config.sync, AsyncConfig)
    nodes = [index for index, node in enumerate(config.cluster.nodes) for _ in node.workers]
    groups = config.sync.groups or [(rank,) for rank in range(len(nodes))]
    leaders = [nodes[group[0]] for group in groups]
    num_nodes = max(nodes) + 1
    return [
        model_bytes * (leaders.count(node) * (num_nodes - 1) + len(leaders) - leaders.count(node)) / num_nodes
        for node in range(num_nodes)
    ]


def _num_averaged_states(config: ExperimentConfig, sync: LocalSgdConfig) -> int:
    if sync.momentum == "kept":
        return 0
    if config.optimizer.name == "adamw":
        return 2
    return int(config.optimizer.momentum > 0)


def wire_s(config: ExperimentConfig, model_bytes: float) -> float:
    """The shortest time per step that a strategy's bytes take on the slowest link, in seconds.

    A node sends while it receives; only the flat server can't, since it answers when it has everything.
    """
    payload_mbit = payload_rate(config.cluster)
    if payload_mbit is None:
        return 0.0
    ways = 2 if isinstance(config.sync, ParameterServerConfig) else 1
    return ways * max(sent_bytes(config, model_bytes)) * 8 / (payload_mbit * 1e6)


def payload_rate(cluster: ClusterConfig) -> float | None:
    """What the slowest link between two nodes carries, Mbit/s: as measured, else as emulated; None: any."""
    measured = [link.mbit for link in cluster.measured_links if link.source != link.target]
    if measured:
        return min(measured)
    limit = slowest_mbit(cluster)
    return None if limit is None else PAYLOAD_SHARE * limit


def overlapped_chunk_bytes(model_bytes: int) -> int:
    """Size of a chunk that is sent during back-propagation, where none is given.

    About 1 MiB; a smaller model is cut into four, so that most of them leave before its end.
    """
    return max(_LEAST_CHUNK_BYTES, min(CHUNK_BYTES, model_bytes // 4))


def exposed_s(config: ExperimentConfig, compute_s: float) -> float:
    """Seconds of a step's communication that nothing hides, as far as is known; 0 without a probe.

    A strategy that overlaps sends while the backward pass runs, from its first bucket to its last one, which
    is always left over.

    Args:
        config: Strategy and probed cluster.
        compute_s: Forward and backward pass of the slowest worker.
    """
    model_bytes = config.cluster.gradient_bytes
    if model_bytes is None:
        return 0.0
    whole_s = wire_s(config, model_bytes)
    sync = config.sync
    if isinstance(sync, HierarchicalConfig) and sync.is_overlapped:
        bucket_bytes = sync.chunk_bytes or overlapped_chunk_bytes(model_bytes)
    elif isinstance(sync, AllReduceConfig):
        bucket_bytes = sync.bucket_bytes
    else:
        return whole_s
    last_s = whole_s * min(1.0, bucket_bytes / model_bytes)
    backward_s = (1 - FORWARD_SHARE) * compute_s * (1 - min(1.0, bucket_bytes / model_bytes))
    return max(last_s, whole_s - backward_s)


def bound_s(config: ExperimentConfig, model_bytes: float) -> float:
    """The shortest time in which N nodes can sum M bytes: 2 (N-1)/N M over the link's rate, in seconds.

    References:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    two_levels = config.model_copy(update={"sync": HierarchicalConfig()})
    return wire_s(two_levels, model_bytes)


def slowest_mbit(cluster: ClusterConfig) -> float | None:
    """The lowest rate of any link, Mbit/s; None when no link has a limit, or there is one node alone."""
    if len(cluster.nodes) == 1:
        return None
    rates = [rate or cluster.link_mbit for node in cluster.nodes for rate in (node.up_mbit, node.down_mbit)]
    return min((rate for rate in rates if rate), default=None)


def shape_text(cluster: ClusterConfig) -> str:
    """`4x2` for four nodes of two workers, `1+3+4` for unequal ones."""
    counts = [len(node.workers) for node in cluster.nodes]
    return f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
