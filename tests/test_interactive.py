"""Laws of telling a person from a program, each in a real kernel."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import papermill
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from made_notebooks import make_notebook, notebook_of, printed, read_strictly

from labkit.errors import ConfigError
from labkit.lab.batch import run_notebook
from labkit.lab.interactive import is_interactive

ASK = "from labkit.lab.interactive import is_interactive; print(is_interactive())"


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernelClient]:
    """A kernel as a front end has it: with someone who can answer `input()`."""
    manager, client = start_new_kernel(
        kernel_name="python3",
        env={**os.environ, "JPY_SESSION_NAME": "/a/nb.ipynb"},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def answer(client: BlockingKernelClient, code: str) -> str:
    texts: list[str] = []
    client.execute_interactive(
        code,
        timeout=30,
        allow_stdin=True,
        output_hook=lambda message: texts.append(message["content"].get("text", "")),
    )
    return "".join(texts).strip()


def test_a_front_end_is_a_person(kernel: BlockingKernelClient) -> None:
    assert answer(kernel, ASK) == "True"


def test_the_environment_decides_against_it(kernel: BlockingKernelClient) -> None:
    assert answer(kernel, f"import os; os.environ['LABKIT_BATCH'] = '1'\n{ASK}") == "False"
    assert answer(kernel, f"os.environ['LABKIT_INTERACTIVE'] = '1'\n{ASK}") == "True"
    assert (
        answer(kernel, f"del os.environ['LABKIT_BATCH']; os.environ['LABKIT_INTERACTIVE'] = '0'\n{ASK}")
        == "False"
    )


def test_plain_papermill_is_a_program_also_below_jupyterlab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/nb.ipynb")  # inherited when a cell starts papermill
    monkeypatch.delenv("LABKIT_BATCH", raising=False)
    executed = papermill.execute_notebook(notebook_of(ASK), None, kernel_name="python3", progress_bar=False)
    assert printed(executed) == "False\n"


def test_our_runner_is_a_program_unless_told_otherwise(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_notebook(tmp_path / "nb.ipynb", ASK)
    assert printed(read_strictly(run_notebook(path).notebook)) == "False\n"
    monkeypatch.setenv("LABKIT_INTERACTIVE", "1")
    assert printed(read_strictly(run_notebook(path, is_repeat=True).notebook)) == "True\n"


def test_a_script_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_INTERACTIVE", raising=False)
    assert not is_interactive()


def test_refuses_a_switch_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_INTERACTIVE", "maybe")
    with pytest.raises(ConfigError, match="LABKIT_INTERACTIVE must be 0 or 1, got 'maybe'"):
        is_interactive()
