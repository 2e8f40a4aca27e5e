"""Where each rank runs and which part of a global batch is its own."""

from dataclasses import dataclass

from labkit.cluster.partition import split_batch
from labkit.config import ClusterConfig


@dataclass(frozen=True)
class Placement:
    """One worker's place in the cluster.

    Attributes:
        rank: Global rank, counted through the nodes in the order of the cluster file.
        world_size: Workers of all nodes.
        node: Name of its node.
        node_index: Position of the node.
        local_rank: Rank within the node.
        local_world_size: Workers of the node.
        device: auto | cpu | cuda | cuda:N.
    """

    rank: int
    world_size: int
    node: str
    node_index: int
    local_rank: int
    local_world_size: int
    device: str


def placements(cluster: ClusterConfig) -> list[Placement]:
    """The place of every worker, by rank; shape (W,)."""
    found: list[Placement] = []
    for node_index, node in enumerate(cluster.nodes):
        for local_rank, worker in enumerate(node.workers):
            found.append(
                Placement(
                    rank=len(found),
                    world_size=cluster.num_workers,
                    node=node.name,
                    node_index=node_index,
                    local_rank=local_rank,
                    local_world_size=len(node.workers),
                    device=worker.device,
                )
            )
    return found


def local_batch_sizes(cluster: ClusterConfig, global_batch_size: int) -> list[int]:
    """Each worker's samples of a full global batch: what the cluster file gives, else an even split.

    Returns:
        Integers summing to `global_batch_size`; shape (W,).
    """
    given = [worker.local_batch_size for node in cluster.nodes for worker in node.workers]
    stated = [size for size in given if size is not None]
    return stated if stated else split_batch(global_batch_size, [1] * len(given))
