"""Communication between workers. Only this package knows torch.distributed and ZeroMQ."""

from labkit.comm.arena import Arena, Counters, give_back_memory, padded_bytes
from labkit.comm.communicator import Communicator, GroupCommunicator, PeerError, SoloCommunicator, Work
from labkit.comm.messages import Message, MessageClient, MessageServer, RemoteError, Reply, Secret
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
    "Message",
    "MessageClient",
    "MessageServer",
    "PeerError",
    "RemoteError",
    "Rendezvous",
    "Reply",
    "Secret",
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
