"""The last states of the stages that one process holds, on this machine's disk, written over after every update."""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.checkpoint.stream import safetensors_pieces
from phalanx.errors import CheckpointError
from phalanx.transport.tensors import tensor_buffers

_MARK = "step"
_TORN = -1


def state_path(directory: Path, stage: int, party: str, step: int) -> Path:
    """Return the path of a party's state after so many steps; even and odd steps have a file each."""
    return directory / f"stage-{stage}.{party}.{step % 2}.safetensors"


class StateFiles:
    """The last two states of each stage, in two files that are written in turn.

    Guarantees:
        Whatever kills the process at whatever moment, the older of the two states is whole, and a file that is not
        says so. Nothing is forced to disk: the crash of the machine may lose both.

    Args:
        directory: Made when missing; one per run.
        party: The party that holds the states.
        give_up: Told why, when the disk refuses; nothing is kept from then on, and the run goes on.
    """

    def __init__(self, directory: Path, party: str, give_up: Callable[[str], None]) -> None:
        self._directory = directory
        self._party = party
        self._give_up = give_up
        self._files: dict[Path, _StateFile] = {}
        self._refused = False

    def keep_state(self, stage: int, step: int, state: Mapping[str, Tensor]) -> None:
        """Write a stage's state after so many steps over the one of two steps ago."""
        if self._refused:
            return
        path = state_path(self._directory, stage, self._party, step)
        try:
            if path not in self._files:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._files[path] = _StateFile(path, state)
            self._files[path].write_state(step, state)
        except OSError as exc:
            self._refused = True
            self.close()
            self._give_up(f"{path}: {exc.strerror or exc}")

    def close(self) -> None:
        """Let go of the files; they stay."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def remove_files(self) -> None:
        """Let go of the files and remove them: the run is complete."""
        paths = list(self._files)
        self.close()
        for path in paths:
            path.unlink(missing_ok=True)


class _StateFile:
    """A safetensors file of fixed names and shapes; its values are written over in place."""

    def __init__(self, path: Path, state: Mapping[str, Tensor]) -> None:
        mark = torch.tensor(_TORN)
        temporary = path.with_suffix(".writing")
        try:
            with temporary.open("wb") as file:
                # the disk takes it all now or never: later writes need no further room
                for piece in safetensors_pieces({_MARK: mark, **state}):
                    file.write(piece)
            temporary.replace(path)
        except OSError:
            # what is left of the disk is for the log
            temporary.unlink(missing_ok=True)
            raise
        self._handle = os.open(path, os.O_RDWR)
        (length,) = struct.unpack("<Q", os.pread(self._handle, 8, 0))
        header = json.loads(os.pread(self._handle, length, 8))
        self._offsets = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}

    def write_state(self, step: int, state: Mapping[str, Tensor]) -> None:
        self._mark_step(_TORN)
        for name, tensor in state.items():
            self._put_bytes(tensor_buffers(tensor.detach().cpu().contiguous()), self._offsets[name])
        self._mark_step(step)

    def close(self) -> None:
        os.close(self._handle)

    def _mark_step(self, step: int) -> None:
        self._put_bytes(memoryview(struct.pack("<q", step)), self._offsets[_MARK])

    def _put_bytes(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, offset)
            data, offset = data[written:], offset + written


def read_state(path: Path, step: int) -> dict[str, Tensor]:
    """Read a kept state."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    written_step = int(tensors.pop(_MARK, torch.tensor(_TORN)))
    if written_step != step:
        state = "was being written" if written_step == _TORN else f"is of step {written_step}"
        raise CheckpointError(f"{path}: {state}, expected the state of step {step}")
    return tensors
