"""The same experiment on a cluster that is somewhat different."""

from collections.abc import Mapping

from labkit.config import ExperimentConfig, from_mapping


def what_if(
    config: ExperimentConfig,
    *,
    global_batch_size: int | None = None,
    speeds: Mapping[str, float] | None = None,
    link_mbit: float | None = None,
) -> ExperimentConfig:
    """Change the size of a batch, the speed of nodes or the rate of links, and let shares be planned anew.

    Args:
        config: An experiment on a probed cluster.
        global_batch_size: Samples per step; default: as it is.
        speeds: By a node's name, how many times as fast as measured its workers are; default: 1.
        link_mbit: Payload rate between nodes, Mbit/s; default: as measured.

    Raises:
        ConfigError: a value is out of its range.
    """
    values = config.model_dump(mode="json")
    if global_batch_size is not None:
        values["engine"]["global_batch_size"] = global_batch_size
    for node in values["cluster"]["nodes"]:
        factor = (speeds or {}).get(node["name"], 1.0)
        for worker in node["workers"]:
            worker["local_batch_size"] = None
            if worker["profile"] is not None:
                worker["profile"]["alpha_s"] /= factor
                worker["profile"]["beta_s"] /= factor
    if link_mbit is not None:
        for link in values["cluster"]["measured_links"]:
            if link["source"] != link["target"]:
                link["mbit"] = link_mbit
    return from_mapping(values)
