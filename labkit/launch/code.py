"""The code that a run depends on: found before anything starts, digested, and copied beside the run."""

import ast
import hashlib
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.config import ExperimentConfig
from labkit.errors import ConfigError
from labkit.runfolder import RunFolder


@dataclass(frozen=True)
class UserModule:
    """A module of the user's that a configuration names.

    Attributes:
        name: Dotted name.
        file: Its source.
        import_path: Folder that must be on the path to import it.
    """

    name: str
    file: Path
    import_path: Path

    @property
    def is_single_file(self) -> bool:
        """It is one file, which can be copied into the run folder."""
        return "." not in self.name and self.file.name == f"{self.name}.py"


def user_modules(config: ExperimentConfig) -> list[UserModule]:
    """Find the modules that `module:function` settings name, without running their functions.

    Raises:
        ConfigError: a module or its function is not there.
    """
    found = []
    for setting, name in (("model.name", config.model.name), ("data.name", config.data.name)):
        if ":" in name:
            found.append(_find(setting, name))
    return list(dict.fromkeys(found))


def _find(setting: str, entry_point: str) -> UserModule:
    module, _, function = entry_point.partition(":")
    if module == "__main__":
        raise ConfigError(
            f"{setting} must name an importable module, got {entry_point!r}: workers can't import a "
            "notebook's cells. Put the function in a cell that begins with %%labfile my_model.py and "
            f"name it my_model:{function}."
        )
    file = _source_of(module)
    if file is None:
        raise ConfigError(
            f"{setting} must be an importable module:function, got {entry_point!r}: there is no module "
            f"{module!r} here. Run from its folder, install it, or write it with %%labfile."
        )
    if not _defines(file, function):
        raise ConfigError(
            f"{setting} must name a function of {module}, got {function!r}. Correct the name, or define "
            f"it in {file.name}."
        )
    return UserModule(module, file, file.parents[module.count(".") + (file.name == "__init__.py")])


def _source_of(module: str) -> Path | None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and spec.origin.endswith(".py") else None


def _defines(file: Path, function: str) -> bool:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise ConfigError(
            f"{file.name} must be Python, got {error.msg} in line {error.lineno}. Fix it."
        ) from None
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == function:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((alias.asname or alias.name) in (function, "*") for alias in node.names):
                return True
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == function for target in targets):
                return True
    return False


@cache
def labkit_digest() -> str:
    """Digest of labkit's own sources: another version may give another result."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def code_digests(modules: list[UserModule]) -> dict[str, str]:
    """Digest of every source that takes part in a run, by name."""
    digests = {"labkit": labkit_digest()}
    for module in modules:
        digests[module.name] = hashlib.sha256(module.file.read_bytes()).hexdigest()[:16]
    return digests


def copy_code(modules: list[UserModule], folder: RunFolder) -> list[str]:
    """Copy single-file modules into the run folder, so that a later edit does not change a resume.

    Returns:
        Folders to put on the workers' path.
    """
    paths = [str(folder.code_dir)]
    folder.code_dir.mkdir(exist_ok=True)
    for module in modules:
        if module.is_single_file:
            shutil.copyfile(module.file, folder.code_dir / module.file.name)
        # A module may import its neighbours, so its own folder stays on the path behind the copy.
        paths.append(str(module.import_path))
    return list(dict.fromkeys(paths))
