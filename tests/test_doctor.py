"""`labkit doctor`: each check finds a good set-up good and a broken one broken, with a remedy."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.lab import doctor
from labkit.lab.doctor import Check, Grade
from labkit.lab.servers import JUPYTER_PORT, MLFLOW_PORT, is_free


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_set_up_has_no_failure_and_is_found_so_without_torch(
    runs: Path, in_empty_folder: Path
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "labkit", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    checks = json.loads(done.stdout)
    assert done.returncode == 0 and len(checks) == len(doctor._CHECKS)
    assert {check["grade"] for check in checks} <= {"ok", "warn"}
    assert all(check["found"] for check in checks)
    assert all(bool(check["remedy"]) == (check["grade"] != "ok") for check in checks)
    assert "labkit.lab.doctor" in done.stderr
    assert not re.search(r"\| +(torch|mlflow)$", done.stderr, flags=re.MULTILINE)


def test_as_text_each_check_is_a_row(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("one", Grade.OK, "fine"), Check("two", Grade.FAIL, "broken", "Mend it.")]
    monkeypatch.setattr(doctor, "_CHECKS", [lambda check=check: check for check in checks])
    assert main(["doctor"]) == 1
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["ok", "one", "fine"]
    assert second.split() == ["fail", "two", "broken", "Mend", "it."]


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", [lambda: Check("one", Grade.WARN, "odd", "Look.")])
    assert main(["doctor"]) == 0


def expect(check: Callable[[], Check], grade: Grade, found: str) -> None:
    result = check()
    assert (result.grade, bool(result.remedy)) == (grade, grade is not Grade.OK)
    assert re.search(found, result.found), result.found


def test_runs_folder_that_cannot_be_written(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(doctor.runs_folder, Grade.OK, re.escape(str(runs)))
    assert list(runs.iterdir()) == []
    (runs / "file").touch()
    monkeypatch.setenv("LABKIT_RUNS", str(runs / "file"))
    expect(doctor.runs_folder, Grade.FAIL, "file: ")


def test_old_mlruns_here(in_empty_folder: Path) -> None:
    expect(doctor.stale_mlruns, Grade.OK, "none")
    (in_empty_folder / "mlruns" / "0").mkdir(parents=True)
    expect(doctor.stale_mlruns, Grade.OK, "none")
    (in_empty_folder / "mlruns" / "0" / "meta.yaml").touch()
    expect(doctor.stale_mlruns, Grade.WARN, re.escape(str(in_empty_folder / "mlruns")))


def test_a_missing_package_is_a_failure_and_another_version_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect(doctor.packages, Grade.OK, "all at the tested versions")
    monkeypatch.setattr(doctor, "_pins", lambda: {"numpy": "0.1"})
    expect(doctor.packages, Grade.WARN, r"numpy [0-9.]+ \(tested: 0.1\)")
    monkeypatch.setattr(doctor, "_pins", lambda: {"no-such-package": "1"})
    expect(doctor.packages, Grade.FAIL, "missing: no-such-package")


def test_a_kernel_of_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(doctor.kernel, Grade.OK, re.escape(sys.executable))
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": ["/usr/bin/other/python3", "-m", "ipykernel"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    expect(doctor.kernel, Grade.FAIL, "/usr/bin/other/python3")


def test_threads_that_fight(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, grade in ((None, Grade.OK), ("1", Grade.OK), ("9999", Grade.WARN), ("many", Grade.WARN)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if value is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert doctor.omp_threads().grade is grade, value


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_free(JUPYTER_PORT):
            listener.bind(("127.0.0.1", JUPYTER_PORT))
            listener.listen()
        expect(doctor.ports, Grade.WARN, str(JUPYTER_PORT))
    if is_free(JUPYTER_PORT) and is_free(MLFLOW_PORT):
        expect(doctor.ports, Grade.OK, "are free")


def test_a_store_on_a_network_file_system(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(doctor.store_filesystem, Grade.OK, r"\w")
    mount = type("Mount", (), {"mountpoint": str(runs), "fstype": "nfs4"})
    monkeypatch.setattr(doctor.psutil, "disk_partitions", lambda all: [mount])
    expect(doctor.store_filesystem, Grade.WARN, "nfs4")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    expect(doctor.store_filesystem, Grade.OK, "nfs4")


def test_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libtorch is gone')")
    expect(doctor.torch_backends, Grade.FAIL, "libtorch is gone")


def test_little_space_is_a_warning(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(doctor.free_space, Grade.OK, "GiB free")
    monkeypatch.setattr(doctor, "_MIN_FREE_BYTES", 2**70)
    expect(doctor.free_space, Grade.WARN, "GiB free")


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    expect(doctor.host_name, Grade.WARN, "no-such-host.invalid does not resolve")


def test_no_chromium_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    expect(doctor.browser, Grade.WARN, "none")
