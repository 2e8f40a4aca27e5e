"""Is everything here that labkit needs? Each check says what it found and, where wanting, the remedy."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from labkit.config import cluster_of_shape
from labkit.errors import ConfigError
from labkit.lab.servers import JUPYTER_PORT, MLFLOW_PORT, is_free
from labkit.launch.emulation import build
from labkit.runfolder import project_root, runs_root

_NETWORK_FILESYSTEMS = set("nfs nfs4 cifs smbfs smb3 lustre gpfs beegfs ceph 9p afs fuse.sshfs".split())
_MIN_FREE_BYTES = 2 * 1024**3
_MIN_SHARED_MEMORY_BYTES = 64 * 1024**2
_TORCH_PROBE = (
    "import json, torch, torch.distributed as d;"
    "print(json.dumps({'version': torch.__version__, 'gloo': d.is_gloo_available(),"
    " 'nccl': d.is_nccl_available(), 'mpi': d.is_mpi_available(), 'gpus': torch.cuda.device_count()}))"
)


class Grade(StrEnum):
    """How a check ended. Only `fail` keeps labkit from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: What was looked at.
        grade: ok, warn or fail.
        found: What is there, one line.
        remedy: What to do about it; "" when there is nothing to do.
    """

    name: str
    grade: Grade
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)


def diagnose() -> list[Check]:
    """Run every check. None of them changes anything but a file it writes and removes in `runs/`."""
    return [check() for check in _CHECKS]


def _judge(name: str, is_good: bool, found: str, remedy: str, otherwise: Grade = Grade.FAIL) -> Check:
    return Check(name, Grade.OK, found) if is_good else Check(name, otherwise, found, remedy)


# --- Python and packages -----------------------------------------------------------------------------


def python_version() -> Check:
    """Python is new enough."""
    found = sys.version.split()[0]
    return _judge("python", sys.version_info >= (3, 11), found, "Use Python 3.11 or newer: make clean run.")


def packages() -> Check:
    """Every package that labkit declares is installed, at the version it is tested with."""
    missing, other = [], []
    pins = _pins()
    for name in sorted({*_declared(), *pins}, key=str.lower):
        installed = _version(name)
        if installed is None:
            missing.append(name)
        elif name in pins and installed.split("+")[0] != pins[name]:
            other.append(f"{name} {installed} (tested: {pins[name]})")
    remedy = "Run `pip install -r requirements.txt` in this environment."
    if missing:
        return Check("packages", Grade.FAIL, f"missing: {', '.join(missing)}", remedy)
    return _judge("packages", not other, "; ".join(other) or "all at the tested versions", remedy, Grade.WARN)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _declared() -> list[str]:
    """Names of the packages that labkit's own metadata asks for, without the optional ones."""
    try:
        lines = importlib.metadata.requires("labkit-lab") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def _pins() -> dict[str, str]:
    """Tested version of each package, from requirements.txt of the checkout."""
    file = (project_root() or Path()) / "requirements.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    return dict(line.split("==", 1) for line in lines if re.match(r"^[A-Za-z0-9._-]+==", line))


def live_figures() -> Check:
    """A figure can move while a run trains: that needs anywidget."""
    is_there = importlib.util.find_spec("anywidget") is not None
    found = "anywidget is here" if is_there else "no anywidget: figures are static while a run goes on"
    return _judge("live figures", is_there, found, "Run `pip install -r requirements.txt`.", Grade.WARN)


def importable() -> Check:
    """A notebook's kernel can import labkit from its own folder."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-c", "import labkit"], cwd=elsewhere, capture_output=True, timeout=60
        )
    remedy = "Run `pip install -e .` in the checkout (`labkit lab` works all the same: it sets PYTHONPATH)."
    found = "from every folder" if done.returncode == 0 else "only from the checkout"
    return _judge("import labkit", done.returncode == 0, found, remedy, Grade.WARN)


def kernel() -> Check:
    """The kernel named python3 runs this environment's Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    remedy = f"Run `{sys.executable} -m ipykernel install --sys-prefix`."
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except (NoSuchKernel, IndexError):
        return Check("kernel python3", Grade.FAIL, "no kernel of this name", remedy)
    # A bare `python` means the Python that starts the kernel. Links are not followed: the Pythons of
    # two environments may be one file.
    is_ours = os.sep not in program or Path(program).parent == Path(sys.executable).parent
    return _judge("kernel python3", is_ours, program if os.sep in program else sys.executable, remedy)


# --- files -------------------------------------------------------------------------------------------


def runs_folder() -> Check:
    """`runs/` can be written."""
    root = runs_root()
    remedy = "Make it writable, or set LABKIT_RUNS to another folder."
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"):
            pass
    except OSError as error:
        return Check("runs folder", Grade.FAIL, f"{root}: {error.strerror or error}", remedy)
    return Check("runs folder", Grade.OK, str(root))


def free_space() -> Check:
    """Room for checkpoints."""
    root = _existing(runs_root())
    free_bytes = shutil.disk_usage(root).free
    remedy = "Remove old runs, or set LABKIT_RUNS to a folder on another disk."
    found = f"{free_bytes / 1024**3:.1f} GiB free"
    return _judge("disk", free_bytes >= _MIN_FREE_BYTES, found, remedy, Grade.WARN)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def store_filesystem() -> Check:
    """The SQLite store does not lie on a network file system, where its locks are not to be trusted."""
    root = _existing(runs_root()).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if root.is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
    is_local = kind.lower() not in _NETWORK_FILESYSTEMS
    remedy = "Set LABKIT_RUNS to a local disk, or MLFLOW_TRACKING_URI to a server (`labkit ui` starts one)."
    is_local = is_local or bool(os.environ.get("MLFLOW_TRACKING_URI"))
    return _judge("store's file system", is_local, kind, remedy, Grade.WARN)


def stale_mlruns() -> Check:
    """No old `mlruns/` that would flip a plain `mlflow` command back to the file store."""
    root = project_root() or Path.cwd()
    places = dict.fromkeys([Path.cwd(), root, root / "notebooks"])
    stale = [str(place / "mlruns") for place in places if any(place.glob("mlruns/*/meta.yaml"))]
    remedy = "Move it away, or convert it with `mlflow migrate-filestore`."
    return _judge("old mlruns/", not stale, ", ".join(stale) or "none", remedy, Grade.WARN)


# --- machine -----------------------------------------------------------------------------------------


def ports() -> Check:
    """The usual ports of `labkit lab`."""
    taken = [str(port) for port in (JUPYTER_PORT, MLFLOW_PORT) if not is_free(port)]
    found = f"in use: {', '.join(taken)}" if taken else f"{JUPYTER_PORT} and {MLFLOW_PORT} are free"
    return _judge("ports", not taken, found, "Nothing: `labkit lab` takes the next free ones.", Grade.WARN)


def host_name() -> Check:
    """This machine's own name resolves; gloo looks it up unless an interface is named."""
    name = socket.gethostname()
    try:
        found, is_known = f"{name} is {socket.gethostbyname(name)}", True
    except OSError:
        found, is_known = f"{name} does not resolve", False
    remedy = f"Add `127.0.1.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface."
    return _judge("host name", is_known, found, remedy, Grade.WARN)


def shared_memory() -> Check:
    """/dev/shm has room, where there is one."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", Grade.OK, "no /dev/shm on this system")
    free_bytes = shutil.disk_usage(folder).free
    remedy = "Give it more: `mount -o remount,size=1G /dev/shm`, or --shm-size=1g for a container."
    found = f"{free_bytes / 1024**2:.0f} MiB free"
    return _judge("shared memory", free_bytes >= _MIN_SHARED_MEMORY_BYTES, found, remedy, Grade.WARN)


def emulation() -> Check:
    """A cluster can be emulated: one node is built and dropped. Nothing else needs it."""
    cluster = cluster_of_shape(1, 1).model_copy(update={"link_mbit": 100.0})
    try:
        with build(cluster) as built:
            right = "as root" if built.user is None else "in a user namespace"
    except ConfigError as error:
        found, _, remedy = str(error).partition(". ")
        return Check("emulation", Grade.WARN, found, remedy)
    return Check("emulation", Grade.OK, f"network namespaces {right}, links shaped by tc")


def cores() -> Check:
    """Cores and memory, for the choice of workers."""
    memory_bytes = psutil.virtual_memory().total
    found = f"{os.cpu_count()} cores, {memory_bytes / 1024**3:.0f} GiB of memory"
    return Check("machine", Grade.OK, found)


def omp_threads() -> Check:
    """OMP_NUM_THREADS does not fight with the threads that labkit gives each worker."""
    value = os.environ.get("OMP_NUM_THREADS")
    found = "each worker gets its share of the cores" if value is None else f"OMP_NUM_THREADS={value}"
    is_good = value is None or (value.isdigit() and 1 <= int(value) <= (os.cpu_count() or 1))
    return _judge("threads", is_good, found, "Unset OMP_NUM_THREADS; use engine.num_threads.", Grade.WARN)


def torch_backends() -> Check:
    """torch works and can talk between processes. Asked in another process: this one stays without torch."""
    try:
        command = [sys.executable, "-c", _TORCH_PROBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return Check("torch", Grade.FAIL, "import takes more than 180 s", "Install it again.")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Check("torch", Grade.FAIL, last, "Run `pip install -r requirements.txt`.")
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    backends = [name for name in ("gloo", "nccl", "mpi") if seen[name]]
    found = f"{seen['version']}, {', '.join(backends) or 'no backend'}, {seen['gpus']} GPUs"
    return _judge("torch", bool(seen["gloo"]), found, "Install a torch build with gloo.")


def browser() -> Check:
    """A Chromium, for the browser tests and for figures as PNG. Nothing else needs it."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    remedy = "Only for browser tests and PNG: apt install chromium."
    return _judge("chromium", path is not None, path or "none", remedy, Grade.WARN)


_CHECKS: Sequence[Callable[[], Check]] = (
    python_version,
    packages,
    live_figures,
    importable,
    kernel,
    runs_folder,
    free_space,
    store_filesystem,
    stale_mlruns,
    ports,
    host_name,
    shared_memory,
    emulation,
    cores,
    omp_threads,
    torch_backends,
    browser,
)
