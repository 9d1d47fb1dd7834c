"""Tensors in safetensors files, found by name and read one at a time."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models.directory import WEIGHTS, WEIGHTS_INDEX, check_weights

_FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightFiles:
    """The safetensors files of one directory.

    Only headers are read until a tensor is asked for.

    Args:
        directory: Holds model.safetensors, or its index and the files that it names.
        prefix: Name of the model without head, which files of some families leave out.
        stored_names: Other names that tensors may have in the files.
        weightless: There are none, and no tensor will be asked for.

    Raises:
        ModelError: No safetensors, only pickled weights, or a malformed header or index.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str,
        stored_names: Mapping[str, str] | None = None,
        *,
        weightless: bool = False,
    ) -> None:
        self._directory = directory
        self._stored_names = stored_names or {}
        self._prefix = f"{prefix}."
        if weightless:
            self._files: dict[str, Path] = {}
            return
        check_weights(directory)
        if (directory / WEIGHTS).is_file():
            with _opened(directory / WEIGHTS) as file:
                self._files = dict.fromkeys(file.keys(), directory / WEIGHTS)
        else:
            self._files = _read_index(directory / WEIGHTS_INDEX)

    def has(self, name: str) -> bool:
        """True if a tensor of that name is there."""
        return self._stored_name(name) is not None

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape.

        Raises:
            ModelError: It is not there.
        """
        stored, path = self._locate(name)
        with _opened(path) as file:
            return list(_header(file, stored, path).get_shape())

    def load_into(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors, converting to their dtype and device; each file is opened once.

        Raises:
            ModelError: One is missing, has another shape, or is not in floating point.
        """
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for name in wanted:
            stored, path = self._locate(name)
            by_file.setdefault(path, []).append((name, stored))
        for path, names in by_file.items():
            with _opened(path) as file:
                for name, stored in names:
                    _fill(file, stored, path, wanted[name])

    def _stored_name(self, name: str) -> str | None:
        choices = (name, name.removeprefix(self._prefix), self._stored_names.get(name, name), _older_name(name))
        return next((name for name in choices if name in self._files), None)

    def _locate(self, name: str) -> tuple[str, Path]:
        stored = self._stored_name(name)
        if stored is None:
            files = sorted({path.name for path in self._files.values()})
            raise ModelError(
                f"{self._directory / files[0] if files else self._directory}: tensor {name!r} is missing; "
                f"{len(self._files)} others are there; expected the complete model"
            )
        return stored, self._files[stored]


def _older_name(name: str) -> str:
    """What the first BERTs, which came from another library, call a norm's numbers."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _fill(file: Any, stored: str, path: Path, target: Tensor) -> None:
    header = _header(file, stored, path)
    if list(header.get_shape()) != list(target.shape):
        raise ModelError(
            f"{path}: tensor {stored!r} has shape {list(header.get_shape())}; config.json says {list(target.shape)}"
        )
    if header.get_dtype() not in _FLOATS:
        raise ModelError(
            f"{path}: tensor {stored!r} has type {header.get_dtype()}; expected one of {', '.join(sorted(_FLOATS))}"
        )
    with torch.no_grad():
        target.copy_(file.get_tensor(stored))


def _header(file: Any, stored: str, path: Path) -> Any:
    try:
        return file.get_slice(stored)
    except SafetensorError as exc:
        raise ModelError(f"{path}: tensor {stored!r} is named in {WEIGHTS_INDEX} but is not in the file") from exc


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{path}: cannot be read as safetensors: {exc}").about(
            code="PHX-I035", file=str(path)
        ) from exc
    with opened as file:
        yield file


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelError(f"{path}: is malformed; expected a JSON object whose weight_map maps names to files") from exc
    for file in set(files.values()):
        # an index must not reach outside its directory
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: names the file {file!r}; expected plain *.safetensors names")
        if not (path.parent / file).is_file():
            raise ModelError(f"{path}: names the file {file!r}, which is missing in {path.parent}")
    return {name: path.parent / file for name, file in files.items()}
