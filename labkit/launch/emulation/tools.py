"""The programs of iproute2, run in the network namespace of the calling thread."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import ConfigError

OR_LOOPBACK = "or run on loopback, where links are not shaped: launch.is_emulated=false"
_SYSTEM_PATHS = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # a plain user's PATH often lacks them


def find_program(name: str) -> str:
    """The path of `ip` or `tc`.

    Raises:
        ConfigError: it is not installed.
    """
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_PATHS]))
    if path is None:
        raise ConfigError(
            f"launch.is_emulated must find the program `{name}`, got none. Install iproute2 (Debian and "
            f"Ubuntu: apt install iproute2), {OR_LOOPBACK}."
        )
    return path


def batch(program: str, lines: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    """Run lines of `ip` or `tc`.

    Raises:
        ConfigError: the program refuses one.
    """
    if lines:
        run_program([program, "-batch", "-"], "\n".join(lines) + "\n", pass_fds)


def run_program(command: Sequence[str], text: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run `ip` or `tc` and return what it prints.

    Args:
        command: Name and arguments.
        text: Its input.
        pass_fds: Descriptors that it inherits.

    Raises:
        ConfigError: it refuses.
    """
    done = subprocess.run(
        [find_program(command[0]), *command[1:]],
        input=text,
        capture_output=True,
        text=True,
        pass_fds=pass_fds,
        timeout=30,
        check=False,
    )
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise ConfigError(
            f"links must be ones that `{command[0]}` accepts, got: {reason}. Correct the cluster file, "
            f"{OR_LOOPBACK}."
        )
    return done.stdout


def devices() -> dict[str, dict[str, Any]]:
    """Network devices with flags and counters, by name."""
    found = json.loads(run_program(["ip", "-j", "-s", "link", "show"]))
    return {device["ifname"]: device for device in found}


def rates() -> dict[str, float]:
    """Mbit/s of every device that is shaped, by name."""
    qdiscs = json.loads(run_program(["tc", "-j", "qdisc", "show"]) or "[]")
    return {q["dev"]: q["options"]["rate"] * 8e-6 for q in qdiscs if q["kind"] == "tbf"}


def is_down(device: Mapping[str, Any]) -> bool:
    """Nothing goes through the device."""
    return "UP" not in device["flags"]
