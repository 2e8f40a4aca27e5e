"""Take part in a run that the first node owns, on a machine of its own."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.cluster.placement import placements
from labkit.comm import StoreClient
from labkit.config import ExperimentConfig
from labkit.errors import ConfigError, LabkitError
from labkit.launch.code import copy_code, user_modules
from labkit.launch.machines import Machine
from labkit.launch.peers import OtherNode
from labkit.launch.supervisor import Supervisor, SupervisorTask, known_by, redirect_to
from labkit.runfolder import ProcessId, RunFolder, RunStatus

_POLL_S = 0.1


@dataclass(frozen=True)
class MemberTask:
    """What a node needs to join.

    Attributes:
        parent: This machine's folder of the experiment's runs; on a shared disk the first node's own.
        config: The experiment; must be the first node's.
        key: The run key of that experiment and this machine's code.
        launcher: Who asked; None: detached.
        rendezvous: The first node's address.
        node: Name of this machine's node.
        secret: Of the parameter servers, the same on all machines; "" where there are none.
    """

    parent: str
    config: ExperimentConfig
    key: str
    launcher: ProcessId | None
    rendezvous: tuple[str, int]
    node: str
    secret: str = field(default="", repr=False)


def join_run(reply: Callable[[str], None], task: MemberTask) -> None:
    """Meet the first node, follow it into its run, and supervise this node's workers.

    Raises:
        LabkitError: the first node does not come.
        ConfigError: it runs another experiment or other code, or has another secret.
    """
    host, port = task.rendezvous
    store = StoreClient(host, port, task.config.launch.start_timeout_s)
    offer = _wait_for_offer(store, task)
    if offer["key"] != task.key:
        raise ConfigError(
            f"all nodes must run the same experiment and code, got run {task.key} here and "
            f"{offer['key']} on the first node. Copy the experiment, your modules and labkit from there."
        )
    if offer["secret"] != known_by(task.secret):
        raise ConfigError(
            "LABKIT_SECRET must be the same on all machines, got another one here than on the first node. "
            "Copy it from there."
        )
    folder = RunFolder(Path(task.parent) / str(offer["folder"]), node=task.node)
    if not folder.exists():
        folder.create(task.config)
    paths = copy_code(user_modules(task.config), folder)
    folder.status_file.parent.mkdir(exist_ok=True)
    folder.write_status(RunStatus(created_at=time.time(), attempt=int(str(offer["attempt"]))))
    redirect_to(folder.supervisor_log)
    places = [place for place in placements(task.config.cluster) if place.node == task.node]
    own = SupervisorTask(
        folder, task.key, task.launcher, tuple(paths), task.rendezvous, task.node, task.secret
    )
    supervisor = Supervisor(own, task.config, places, store, OtherNode(store, task.node), Machine(host))
    supervisor.take_over()
    reply(str(folder.path))
    supervisor.run()


def _wait_for_offer(store: StoreClient, task: MemberTask) -> dict[str, object]:
    limit_s = task.config.launch.start_timeout_s
    deadline = time.monotonic() + limit_s
    while (text := store.get("run")) is None:
        if time.monotonic() > deadline:
            raise LabkitError(f"the first node must offer a run within {limit_s:g} s. Is it running?")
        time.sleep(_POLL_S)
    offer = json.loads(text)
    assert isinstance(offer, dict)
    return offer
