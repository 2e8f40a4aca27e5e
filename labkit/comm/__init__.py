"""Communication between workers. Only this package knows torch.distributed."""

from labkit.comm.communicator import Communicator, GroupCommunicator, PeerError, SoloCommunicator, Work
from labkit.comm.rendezvous import Rendezvous, StoreServer, join

__all__ = [
    "Communicator",
    "GroupCommunicator",
    "PeerError",
    "Rendezvous",
    "SoloCommunicator",
    "StoreServer",
    "Work",
    "join",
]
