"""Where each rank runs."""

from dataclasses import dataclass

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

    @property
    def label(self) -> str:
        """How tables and figures of a plan name the worker: `2 on node1`."""
        return f"{self.rank} on {self.node}"


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


def server_ranks(cluster: ClusterConfig) -> range:
    """A number for each node's server beside those of the workers, for its log and its sign of life."""
    return range(cluster.num_workers, cluster.num_workers + len(cluster.nodes))


def process_name(cluster: ClusterConfig, rank: int) -> tuple[str, str]:
    """What to call a worker, or a server by its `server_ranks` number, and its node's name."""
    if rank < cluster.num_workers:
        return f"worker {rank}", placements(cluster)[rank].node
    index = rank - cluster.num_workers
    return f"server {index}", cluster.nodes[index].name
