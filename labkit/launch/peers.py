"""How the supervisors of several machines tell each other that they live and how it ended."""

import contextlib
import time
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from labkit.comm import PeerError, StoreClient, StoreServer
from labkit.runfolder import RunError, RunState

_GOODBYE_S = 5.0


class End(BaseModel):
    """How a run, or one node's part in it, ended."""

    model_config = ConfigDict(frozen=True)

    state: RunState
    error: RunError | None = None


class Peers(Protocol):
    """The supervisors of the other nodes, as one of them sees them."""

    def beat(self) -> None:
        """Say that this node lives, and look whether the others do."""
        ...

    def news(self) -> End | None:
        """Why another node wants the run to end; None while all is well."""
        ...

    def tell(self, end: End) -> None:
        """Say how it ended here, and wait a moment until the others know."""
        ...


class NoPeers:
    """All workers are on this machine."""

    def beat(self) -> None:
        return None

    def news(self) -> End | None:
        return None

    def tell(self, end: End) -> None:
        return None


@dataclass
class _Seen:
    text: str | None
    at: float


class FirstNode:
    """The node that serves the store and owns the run."""

    def __init__(
        self, store: StoreServer, others: list[str], start_timeout_s: float, timeout_s: float
    ) -> None:
        """Expect the other nodes.

        Args:
            store: Served here.
            others: Names of the other nodes.
            start_timeout_s: Longest wait for a node to come.
            timeout_s: Longest silence of a node that has come.
        """
        self._store = store
        self._seen = {name: _Seen(None, time.monotonic()) for name in others}
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s

    def beat(self) -> None:
        for name, seen in self._seen.items():
            text = self._store.get(f"beat/{name}")
            if text != seen.text:
                self._seen[name] = _Seen(text, time.monotonic())

    def news(self) -> End | None:
        for name, seen in self._seen.items():
            text = self._store.get(f"end/{name}")
            if text is not None:
                end = End.model_validate_json(text)
                if end.state is not RunState.FINISHED:
                    return end
                continue
            age_s = time.monotonic() - seen.at
            if age_s > (self._start_timeout_s if seen.text is None else self._timeout_s):
                what = "did not join" if seen.text is None else "showed no life"
                return End(
                    state=RunState.FAILED,
                    error=RunError(message=f"node {name} {what} for {age_s:.0f} s", node=name),
                )
        return None

    def tell(self, end: End) -> None:
        self._store.put("end", end.model_dump_json())
        deadline = time.monotonic() + _GOODBYE_S
        while time.monotonic() < deadline:
            known = [name for name, seen in self._seen.items() if seen.text is not None]
            if all(self._store.get(f"left/{name}") for name in known):
                return
            time.sleep(0.05)


class OtherNode:
    """A node that joined a run which the first node owns."""

    def __init__(self, store: StoreClient, name: str) -> None:
        self._store = store
        self._name = name

    def beat(self) -> None:
        with contextlib.suppress(PeerError):  # `news` says it
            self._store.put(f"beat/{self._name}", str(time.time()))

    def news(self) -> End | None:
        try:
            text = self._store.get("end")
        except PeerError:
            return End(
                state=RunState.FAILED,
                error=RunError(message="the first node is gone: its store does not answer any more"),
            )
        return End.model_validate_json(text) if text is not None else None

    def tell(self, end: End) -> None:
        with contextlib.suppress(PeerError):
            self._store.put(f"end/{self._name}", end.model_dump_json())
            deadline = time.monotonic() + _GOODBYE_S
            while self._store.get("end") is None and time.monotonic() < deadline:
                time.sleep(0.05)
            self._store.put(f"left/{self._name}", "yes")
