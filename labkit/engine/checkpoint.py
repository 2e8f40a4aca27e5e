"""Checkpoints: whole or absent, checked before use, and unable to run code."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from labkit.comm import Communicator
from labkit.errors import LabkitError
from labkit.runfolder import RunFolder

FORMAT = 1


class CheckpointError(LabkitError):
    """A checkpoint can't be used."""


def write_checkpoint(path: Path, content: dict[str, Any]) -> int:
    """Write a checkpoint under a temporary name, flush it to disk, rename it.

    Args:
        path: Its final name.
        content: Tensors, numbers, text, lists and dicts only.

    Returns:
        Its size in bytes.

    Raises:
        OSError: the disk is full or gone; the checkpoints before it are untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            _save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size_bytes


class _Recorder:
    """A file that remembers why writing to it failed: torch.save says only that it did."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    recorder = _Recorder(file)
    try:
        torch.save(content, recorder)  # type: ignore[arg-type]
    except RuntimeError as error:
        if recorder.error is None:
            raise
        raise recorder.error from error


def read_checkpoint(data: bytes, name: str) -> dict[str, Any]:
    """Check and read a checkpoint. Only tensors and plain values load; code never runs.

    Args:
        data: The file's bytes.
        name: What to call it in an error.

    Raises:
        CheckpointError: it is cut off, a byte has flipped, or it is of another format.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"{name} must be whole, got a wrong checksum in {broken}.")
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name} must be whole, got {type(error).__name__}: {error}".splitlines()[0]
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{name} must be a labkit checkpoint of format {FORMAT}, got another one.")
    return content


def newest_checkpoint(folder: RunFolder, say: Callable[[str], None]) -> bytes | None:
    """The newest checkpoint that is whole; each damaged one that is passed over is said.

    Returns:
        Its bytes, or None when there is none.
    """
    for path in sorted(folder.checkpoints_dir.glob("step*.pt"), reverse=True):
        data: bytes = path.read_bytes()
        try:
            read_checkpoint(data, path.name)
        except CheckpointError as error:
            say(f"checkpoint passed over: {error} Using the one before it.")
            continue
        return data
    return None


def load_everywhere(data: bytes | None, comm: Communicator, device: torch.device) -> dict[str, Any] | None:
    """Send worker 0's checkpoint to all workers, so that nodes need no shared disk.

    Args:
        data: The checkpoint's bytes on worker 0; None there means that there is none.
        comm: The workers.
        device: Where collectives work.
    """
    size = torch.tensor([len(data) if data else 0], dtype=torch.int64, device=device)
    comm.broadcast_(size)
    if int(size) == 0:
        return None
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data and comm.rank == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast_(buffer)
    return read_checkpoint(buffer.cpu().numpy().tobytes(), "checkpoint")


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all but the newest checkpoints, and what a killed writer left half done."""
    for path in sorted(folder.checkpoints_dir.glob("step*.pt"))[:-keep]:
        path.unlink(missing_ok=True)
    for path in folder.checkpoints_dir.glob(".step*"):
        path.unlink(missing_ok=True)
