"""The network of a run: made by its supervisor, found by whoever wants to change it while the run goes on."""

from labkit.config import ExperimentConfig
from labkit.engine.quota import quotas_of
from labkit.errors import ConfigError
from labkit.launch.emulation.builder import build
from labkit.launch.emulation.emulation import Emulation
from labkit.launch.emulation.network import Loopback, Network
from labkit.launch.emulation.record import EmulationRecord, open_record, record_of
from labkit.launch.emulation.standing import open_equal
from labkit.runfolder import RunFolder, write_atomically


def network_of(config: ExperimentConfig, folder: RunFolder) -> Network:
    """Make the network that a run asks for, or take the standing cluster that is equal to its own.

    Called by the supervisor before it has threads, since this process moves to where it may enter the nodes.

    Raises:
        ConfigError: the cluster, or the speed of its workers, can't be emulated here.
    """
    if not config.launch.is_emulated:
        rates = [(node.up_mbit, node.down_mbit) for node in config.cluster.nodes]
        return Loopback(
            is_shape_wanted=bool(config.cluster.link_mbit or config.cluster.rtt_ms) or any(map(any, rates))
        )
    emulation = open_equal(config.cluster) or build(config.cluster)
    emulation.log = folder.supervisor_log
    emulation.join()
    write_atomically(folder.emulation_file, record_of(emulation).model_dump_json(indent=1))
    emulation.quotas = quotas_of(config)  # last: nothing that may still fail leaves them behind
    return emulation


def open_run(folder: RunFolder) -> Emulation:
    """Take hold of the emulated network of a run that is going on.

    Raises:
        ConfigError: the run has none, or has ended.
    """
    if not folder.emulation_file.is_file():
        raise ConfigError(
            f"run must be emulated, got {folder.key}, which is on loopback. Start it with --emulate."
        )
    record = EmulationRecord.model_validate_json(folder.emulation_file.read_bytes())
    if not record.holder.is_alive():
        raise ConfigError(f"run must be going on, got {folder.key}, which has ended. Resume or start it.")
    return open_record(record, log=folder.supervisor_log)
