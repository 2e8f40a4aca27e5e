"""Laws of the parameter servers' messages: one version per pull, one life per group, nothing counted twice."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labkit.comm import MessageClient, MessageServer, Secret
from labkit.config import ExperimentConfig, from_overrides
from labkit.engine import checkpoint
from labkit.engine.events import EventLog
from labkit.engine.server import Coordinator, Server, message_limit
from labkit.engine.server_link import ServerLink
from labkit.runfolder import RunFolder
from labkit.sync.server_shard import ServerShard, shard_borders, trained

NUM_SAMPLES = 600
WAIT_S = 30.0


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 100, bias=False), nn.Linear(100, 3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@dataclass
class _Servers:
    """Servers in threads of this process."""

    addresses: list[str]
    borders: list[int]
    folder: RunFolder
    stop: threading.Event
    results: list[bool]
    secret: Secret

    def link(self, group: int, timeout_s: float = WAIT_S) -> ServerLink:
        return ServerLink(
            self.addresses, self.secret, group, self.borders, timeout_s=timeout_s, heartbeat_s=0.1
        )

    def client(self) -> MessageClient:
        return MessageClient(self.addresses[0], self.secret, timeout_s=WAIT_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.read_events(0)[0] if event["kind"] == kind]


def _config(*overrides: str) -> ExperimentConfig:
    shared = [
        "cluster=3x1",
        "engine.global_batch_size=60",
        "sync=async_parameter_server",
        "engine.num_epochs=2",
        "launch.stop_grace_s=1",
    ]
    return from_overrides([*shared, "optimizer.learning_rate=1", "optimizer.momentum=0", *overrides])


@contextlib.contextmanager
def _servers(path: Path, config: ExperimentConfig, num_servers: int = 3) -> Iterator[_Servers]:
    secret, stop, results = Secret.new(), threading.Event(), []
    folder = RunFolder(path)
    folder.create(config)
    messages = [
        MessageServer("127.0.0.1", secret, max_bytes=message_limit(_model())) for _ in range(num_servers)
    ]
    sizes = [parameter.numel() for parameter in trained(_model())]
    borders = shard_borders(sizes, num_servers)
    others = [MessageClient(each.address, secret, timeout_s=WAIT_S) for each in messages[1:]]
    log = EventLog(folder.events_file(0), 1)

    def coordinate() -> None:
        coordinator = Coordinator(
            config, messages[0], _model(), (borders[0], borders[1]), others, log, folder, NUM_SAMPLES, stop.is_set
        )  # fmt: skip
        results.append(coordinator.run())

    shards = [
        ServerShard(_model(), config.optimizer, borders[i], borders[i + 1]) for i in range(1, num_servers)
    ]
    threads = [
        threading.Thread(target=Server(own, shard).serve)
        for own, shard in zip(messages[1:], shards, strict=True)
    ]
    threads.append(threading.Thread(target=coordinate))
    for thread in threads:
        thread.start()
    try:
        yield _Servers(
            [each.address for each in messages], [sum(sizes[:b]) for b in borders], folder, stop, results, secret
        )  # fmt: skip
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        for each in (*others, *messages):
            each.close()
        log.close()
    assert not any(thread.is_alive() for thread in threads)


def _work(link: ServerLink, found: list[tuple[int, torch.Tensor]], pause_s: float = 0.0) -> None:
    """As a group does: every push adds 1 to all parameters."""
    figures = {"loss_sum": 0.0, "accuracy_sum": 0.0, "parts_s": {}}
    nothing = torch.empty(0, dtype=torch.float64)
    taken = link.take().result(WAIT_S)
    while taken.what in ("extent", "evaluate"):
        assert taken.parameters is not None
        ahead = link.take() if taken.extent is not None else None
        if taken.is_evaluated:
            link.evaluated({"val/loss": 0.0}, taken)
        if taken.extent is not None:
            found.append((taken.extent.base_version, taken.parameters))
            time.sleep(pause_s)
            share = taken.extent.num_samples / 60
            link.push(taken.number, torch.full_like(taken.parameters, -1.0 / share), figures, nothing)
        taken = ahead.result(WAIT_S) if ahead is not None else link.take().result(WAIT_S)
    assert taken.what == "done"
    link.leave()
    link.close()


@pytest.mark.parametrize("num_servers", [1, 3, 7])
def test_every_pull_is_one_version_under_load(tmp_path: Path, num_servers: int) -> None:
    """MXNet #2825: parts of one pull from different versions. Here each parameter is the version's number."""
    with _servers(tmp_path / "run", _config(), num_servers) as servers:
        found: list[list[tuple[int, torch.Tensor]]] = [[], [], []]
        workers = [
            threading.Thread(target=_work, args=(servers.link(group), found[group], 0.002 * group)) for group in range(3)
        ]  # fmt: skip
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_S)
    pulls = [pull for of_one in found for pull in of_one]
    assert len(pulls) == 2 * NUM_SAMPLES // 20
    for version, parameters in pulls:
        torch.testing.assert_close(
            parameters, torch.full_like(parameters, float(version)), rtol=1e-5, atol=1e-5
        )
    assert servers.results == [True]
    assert servers.events("metrics")[-1]["samples"] == 2 * NUM_SAMPLES
    assert servers.events("staleness")[-1]["repeated"] == 0


def test_evaluations_do_not_hold_up_what_others_wait_for(tmp_path: Path) -> None:
    """The evaluator has the next extent already; with a small bound all wait until that is computed too."""
    config = _config("sync.staleness_bound=1", "engine.eval_every_steps=1")
    with _servers(tmp_path / "run", config) as servers:
        workers = [threading.Thread(target=_work, args=(servers.link(group), [])) for group in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_S)
            assert not worker.is_alive()
    assert servers.results == [True]
    assert len(servers.events("eval")) >= 10


def _join(client: MessageClient, group: int) -> dict[str, Any]:
    return {"group": group, "life": client.request("join", {"group": group}).header["life"]}


def _take(client: MessageClient, who: dict[str, Any]) -> dict[str, Any]:
    while (reply := client.request("take", who).header)["what"] == "wait":
        time.sleep(0.01)
    return reply


def _commit(client: MessageClient, who: dict[str, Any], number: int) -> int:
    figures = {"number": number, "loss_sum": 0.0, "accuracy_sum": 0.0, "parts_s": {}}
    return client.send("commit", {**who, **figures}, [torch.empty(0, dtype=torch.float64)])


def test_a_repeated_push_is_applied_once_and_a_former_life_counts_for_nothing(tmp_path: Path) -> None:
    with _servers(tmp_path / "run", _config(), 1) as servers, contextlib.ExitStack() as stack:
        client, again = servers.client(), servers.client()
        for each in (client, again):
            stack.callback(each.close)
        former, *_ = [_join(client, group) for group in range(3)]
        first, second = _take(client, former), _take(client, former)
        gradient = torch.ones(sum(parameter.numel() for parameter in _model().parameters()))
        for number in (first["number"], first["number"], second["number"]):
            client.request("stage", {**former, "number": number}, [gradient])
        applied = client.receive(_commit(client, former, first["number"])).header
        assert applied == {"is_applied": True, "version": 1, "staleness": 0}
        assert client.receive(_commit(client, former, first["number"])).header == {"is_applied": False}

        now = _join(again, 0)  # the group came in another process, before anybody missed the first one
        assert now["life"] == former["life"] + 1
        assert client.request("take", former).header["what"] == "gone"
        assert client.receive(_commit(client, former, second["number"])).header == {"is_applied": False}
        client.request("leave", former)
        given = _take(again, now)
        assert given["extent"]["start"] == second["extent"]["start"]  # the samples that the first one had
        assert given["extent"]["base_version"] == 1
        assert any("group 0 came again" in event["text"] for event in servers.events("message"))


def test_what_makes_no_sense_is_refused_and_the_coordinator_goes_on(tmp_path: Path) -> None:
    with _servers(tmp_path / "run", _config(), 1) as servers:
        client = servers.client()
        for kind, header, tensors in [
            ("join", {"group": 3}, []),
            ("join", {}, []),
            ("take", {"group": 0}, []),
            ("stage", {"group": 0, "number": 1}, [torch.ones(2)]),
            ("dance", {"group": 0}, []),
        ]:
            refused = pytest.raises(Exception, match="could not be done|refused") if kind != "take" else contextlib.nullcontext()  # fmt: skip
            with refused:
                assert client.request(kind, header, tensors).header["what"] == "gone"
        _join(client, 0)
        client.close()


def test_a_silent_group_is_let_go_but_a_pause_of_the_coordinator_is_nobodys_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_checkpoint

    def slow_write(path: Path, content: dict[str, Any]) -> int:
        time.sleep(1.5)
        return write(path, content)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow_write)
    config = _config("sync.heartbeat_timeout_s=0.8", "engine.checkpoint_every_steps=1", "engine.max_steps=2")
    with _servers(tmp_path / "run", config) as servers:
        silent = servers.client()
        _join(silent, 2)
        workers = [threading.Thread(target=_work, args=(servers.link(group), [])) for group in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_S)
            assert not worker.is_alive()
        silent.close()
    told = [event["text"] for event in servers.events("message")]
    assert [text for text in told if "showed no life" in text] == ["group 2 showed no life for 0.8 s"]
    assert servers.results == [True]


def test_a_link_closes_at_once_while_its_push_waits_for_others(tmp_path: Path) -> None:
    with _servers(tmp_path / "run", _config("sync.staleness_bound=0")) as servers:
        link, *others = (servers.link(group) for group in range(3))
        taken = link.take().result(WAIT_S)
        assert taken.parameters is not None
        figures = {"loss_sum": 0.0, "accuracy_sum": 0.0, "parts_s": {}}
        link.push(
            taken.number, torch.zeros_like(taken.parameters), figures, torch.empty(0, dtype=torch.float64)
        )
        ahead = link.take()  # waits for the push, which waits for the other groups
        time.sleep(0.3)
        assert not ahead.done()
        began_at = time.monotonic()
        link.leave()
        link.close()
        assert time.monotonic() - began_at < 2.0
        for other in others:
            other.leave()
            other.close()
