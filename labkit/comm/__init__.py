"""Communication between workers. Only this package knows torch.distributed."""

from labkit.comm.arena import Arena, Counters, give_back_memory, padded_bytes
from labkit.comm.communicator import Communicator, GroupCommunicator, PeerError, SoloCommunicator, Work
from labkit.comm.rendezvous import (
    Rendezvous,
    StoreClient,
    StoreServer,
    address_towards,
    interface_towards,
    join,
)
from labkit.comm.traffic import resident_bytes, sent_bytes

__all__ = [
    "Arena",
    "Counters",
    "give_back_memory",
    "padded_bytes",
    "Communicator",
    "GroupCommunicator",
    "PeerError",
    "Rendezvous",
    "SoloCommunicator",
    "StoreClient",
    "StoreServer",
    "Work",
    "address_towards",
    "interface_towards",
    "join",
    "resident_bytes",
    "sent_bytes",
]
