"""Laws of %%labfile: a cell that is also a module."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from made_notebooks import make_notebook, printed, read_strictly
from traitlets.config import Config

from labkit.errors import ConfigError
from labkit.lab.batch import run_notebook
from labkit.lab.magic import load_ipython_extension, modules_dir, run_as_module
from labkit.runfolder import RunState


@pytest.fixture
def shell(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """IPython in this process; what a test imports or puts on the path goes away with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("LABKIT_NOTEBOOK_DIR", raising=False)
    before = set(sys.modules)
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    load_ipython_extension(shell)
    yield shell
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_cell_is_a_module_and_its_names_are_here(shell: InteractiveShell, runs: Path) -> None:
    shell.run_cell_magic("labfile", "my_net.py", "class Net:\n    width = 3\n\ndef build(): return Net()\n")
    import my_net  # type: ignore[import-not-found]

    assert Path(my_net.__file__).parent.parent == runs / "modules"
    assert shell.user_ns["build"] is my_net.build
    assert shell.user_ns["Net"].__module__ == "my_net"  # so that workers can unpickle it
    assert Path(my_net.__file__).read_text().startswith("class Net:")


def test_running_an_edited_cell_takes_effect_at_once(shell: InteractiveShell) -> None:
    for value in range(5):  # same size, same second: what bytecode caches fall for
        file = run_as_module(shell, "edited.py", f"value = {value}\n")
        assert shell.user_ns["value"] == value == sys.modules["edited"].value
        assert file.read_text() == f"value = {value}\n"
    assert not list(file.parent.glob("__pycache__/edited*"))


def test_names_that_a_cell_no_longer_defines_go_away(shell: InteractiveShell) -> None:
    run_as_module(shell, "names.py", "a, b, c = 1, 2, object()\n")
    shell.user_ns["b"] = "the notebook's own now"
    run_as_module(shell, "names.py", "a = 2\n")
    assert shell.user_ns["a"] == 2 and shell.user_ns["b"] == "the notebook's own now"
    assert "c" not in shell.user_ns and not hasattr(sys.modules["names"], "c")


def test_a_cell_that_is_not_python_leaves_the_module_as_it_was(shell: InteractiveShell) -> None:
    file = run_as_module(shell, "kept.py", "a = 1\n")
    with pytest.raises(SyntaxError):
        run_as_module(shell, "kept.py", "a = \n")
    assert file.read_text() == "a = 1\n" and sys.modules["kept"].a == 1


def test_a_cell_that_failed_can_be_corrected(shell: InteractiveShell) -> None:
    with pytest.raises(NameError):
        run_as_module(shell, "mended.py", "a = unknown\n")
    run_as_module(shell, "mended.py", "a = 1\n")
    assert shell.user_ns["a"] == 1


def test_a_module_sees_only_what_it_imports(shell: InteractiveShell) -> None:
    shell.user_ns["np"] = "the notebook's"
    with pytest.raises(NameError):
        run_as_module(shell, "alone.py", "array = np.zeros(1)\n")


def test_one_module_may_import_another(shell: InteractiveShell) -> None:
    run_as_module(shell, "blocks.py", "size = 3\n")
    run_as_module(shell, "whole.py", "from blocks import size\n")
    assert sys.modules["whole"].size == 3


@pytest.mark.parametrize(
    "name", ["", "net", "my-net.py", "1net.py", "class.py", "a/b.py", "../up.py", "a b.py", "net.txt"]
)
def test_refuses_what_is_no_module_name(shell: InteractiveShell, name: str) -> None:
    with pytest.raises(ConfigError, match="must be followed by a module's file name, got"):
        run_as_module(shell, name, "a = 1")


@pytest.mark.parametrize("name", ["json", "sys", "numpy", "torch", "labkit", "antigravity"])
def test_refuses_to_shadow_a_module_that_is_there(shell: InteractiveShell, runs: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"must name a new module, got '{name}', which is "):
        run_as_module(shell, f"{name}.py", "a = 1")
    assert not list(runs.iterdir())


def test_refuses_to_shadow_a_file_beside_the_notebook(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="must name a new module, got 'beside'"):
        run_as_module(shell, "beside.py", "a = 1")


def test_a_bad_name_is_one_line_in_the_notebook(shell: InteractiveShell) -> None:
    with pytest.raises(UsageError, match="module's file name, got 'torch'"):
        shell.run_cell_magic("labfile", "torch", "a = 1")


def test_each_notebook_has_modules_of_its_own(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/one.ipynb")
    one = modules_dir(shell)
    assert modules_dir(shell) == one
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/two.ipynb")
    assert modules_dir(shell) != one and len(one.name) == 8


def test_through_a_real_kernel_another_process_imports_it(runs: Path, tmp_path: Path) -> None:
    path = make_notebook(
        tmp_path / "nb.ipynb",
        "%load_ext labkit.lab.magic",
        "%%labfile my_model.py\nimport os\n\ndef build(): return os.getpid()",
        "import subprocess, sys, my_model\n"
        "code = f'import sys; sys.path.insert(0, {os.path.dirname(my_model.__file__)!r})\\n'\n"
        "code += 'import my_model; print(my_model.build())'\n"
        "seen = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout\n"
        "print(int(seen) != build() == os.getpid())",
        "%%labfile torch.py\na = 1",
    )
    result = run_notebook(path)
    executed = read_strictly(result.notebook)
    assert printed(executed) == "True\n"
    assert result.state is RunState.FAILED and result.error is not None
    assert "must name a new module, got 'torch'" in result.error.message
    assert "Traceback" not in str(executed.cells[-1].outputs)
