"""Input from shards: how fast it is read and how well it is mixed, and what holds a training up."""

from labkit.lab.input._study import Result, Setting, Study, Trained, record
from labkit.lab.input._view import mixing, rates, table, waits

__all__ = ["Result", "Setting", "Study", "Trained", "mixing", "rates", "record", "table", "waits"]
