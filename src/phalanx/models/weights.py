"""Tensors in safetensors files, found by name and read one at a time."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from phalanx.errors import ModelError
from phalanx.models.directory import WEIGHTS, WEIGHTS_INDEX, check_weights
from phalanx.models.families import TRANSFORMERS_REFUSALS
from phalanx.models.family import Family
from phalanx.models.quiet import quiet_transformers

_FLOATS = {"F64", "F32", "F16", "BF16"}
_MAX_TABLE_BYTES = 1 << 30


class WeightFiles:
    """The safetensors files of one directory.

    Only headers are read until a tensor is asked for.

    Args:
        directory: Holds model.safetensors, or its index and the files that it names.
        family: Says which names tensors may have in the files, and which of them lie there in pieces.
        ties_head: Head and embedding are one tensor, which the files may hold under the name of either.
        weightless: There are none, and no tensor will be asked for.
    """

    def __init__(self, directory: Path, family: Family, *, ties_head: bool, weightless: bool = False) -> None:
        self._directory = directory
        self._family = family
        embedding = (family.embedding_weight, *family.other_embeddings)
        tied = (*embedding, family.head_weight)
        self._same = dict.fromkeys(tied, tied) if ties_head else dict.fromkeys(embedding, embedding)
        if weightless:
            self._files: dict[str, Path] = {}
            return
        check_weights(directory)
        if (directory / WEIGHTS).is_file():
            with _open_file(directory / WEIGHTS) as file:
                self._files = dict.fromkeys(file.keys(), directory / WEIGHTS)
        else:
            self._files = _read_index(directory / WEIGHTS_INDEX)

    def has_weight(self, name: str) -> bool:
        """True if a tensor of that name is there, whole or in pieces."""
        return self.stored_name(name) is not None or self._num_experts(name) > 0

    def weight_shape(self, name: str) -> list[int]:
        """Return a tensor's shape; of one in pieces, the shape that they have together."""
        num_experts = self._num_experts(name)
        if not num_experts:
            return self._stored_shape(name)
        shapes = [self._stored_shape(piece.format(0)) for piece in self._family.expert_pieces(name)]
        return [num_experts, sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def load_into(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors, converting to their dtype and device; each file is opened once."""
        for file, stored, path, target in self._each_tensor(wanted):
            _check_header(file, stored, path, target)
            with torch.no_grad():
                target.copy_(file.get_tensor(stored))

    def check_shapes(self, wanted: Mapping[str, Tensor]) -> None:
        """Compare shapes with those in the files' headers, before there is memory: the tensors may be on `meta`.

        Raises:
            ModelError: A tensor is missing, or has another shape or no floating point.
        """
        for file, stored, path, target in self._each_tensor(wanted):
            _check_header(file, stored, path, target)

    @property
    def num_tensors(self) -> int:
        """How many tensors the files have."""
        return len(self._files)

    def _each_tensor(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[Any, str, Path, Tensor]]:
        """Yield an open file, the name of a tensor there, the file's path, and the wanted tensor or a piece of it."""
        by_file: dict[Path, list[tuple[str, Tensor]]] = {}
        for name, target in self._split_pieces(wanted):
            stored, path = self._locate_tensor(name)
            by_file.setdefault(path, []).append((stored, target))
        for path, targets in by_file.items():
            with _open_file(path) as file:
                for stored, target in targets:
                    yield file, stored, path, target

    def unused_names(self, wanted: Collection[str]) -> list[str]:
        """Return the tensors of the files that are none of these: another program may load them in their place."""
        used = {self.stored_name(name) for name in wanted}
        for name in wanted:
            pieces = self._family.expert_pieces(name)
            used |= {self.stored_name(piece.format(n)) for n in range(self._num_experts(name)) for piece in pieces}
        return sorted(self._files.keys() - used)

    def shadowing_name(self, wanted: Collection[str]) -> str | None:
        """Return a tensor of the files that another program may load in the place of one of these; None without one."""
        unused = self.unused_names(wanted)
        used = self._files.keys() - set(unused)
        for name in unused:
            plain = _newer_name(name)
            if any(plain == other or plain.endswith(f".{other}") or other.endswith(f".{plain}") for other in used):
                return name
        return None

    def _split_pieces(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Give each tensor that the files hold in pieces as those pieces, which are views of it."""
        for name, target in wanted.items():
            num_experts = self._num_experts(name)
            if not num_experts:
                yield name, target
                continue
            if num_experts > len(target):
                last = self._family.expert_pieces(name)[0].format(num_experts - 1)
                raise ModelError(f"{self._files[last]}: holds {last!r}; config.json says {len(target)} experts")
            yield from split_experts(self._family, name, target.detach())

    def _num_experts(self, name: str) -> int:
        """Count the experts whose pieces make up a tensor; 0 where the files hold it whole, or not at all."""
        pieces = self._family.expert_pieces(name)
        if not pieces or self.stored_name(name) is not None:
            return 0
        num_experts = 0
        while self.stored_name(pieces[0].format(num_experts)) is not None:
            num_experts += 1
        return num_experts

    def _stored_shape(self, name: str) -> list[int]:
        stored, path = self._locate_tensor(name)
        with _open_file(path) as file:
            return list(_tensor_header(file, stored, path).get_shape())

    def stored_name(self, name: str) -> str | None:
        """Return the name that the files have for a tensor, None where they hold it in pieces or not at all."""
        names = (name, *self._same.get(name, ()))
        return next((stored for one in names for stored in self._possible_names(one) if stored in self._files), None)

    def _possible_names(self, name: str) -> tuple[str, ...]:
        """List the names that files of the family may have for a tensor."""
        hub_name = self._family.hub_name(name)
        return name, name.removeprefix(f"{self._family.prefix}."), hub_name, _older_name(name)

    def _locate_tensor(self, name: str) -> tuple[str, Path]:
        stored = self.stored_name(name)
        if stored is None:
            files = sorted({path.name for path in self._files.values()})
            raise ModelError(
                f"{self._directory / files[0] if files else self._directory}: tensor {name!r} is missing; "
                f"{len(self._files)} others are there; expected the complete model"
            )
        return stored, self._files[stored]


def check_claims(directory: Path, kind: Any) -> None:
    """Refuse a config that claims more weights than the files beside it hold, before there is memory for any.

    For models that transformers loads whole: it takes memory for every claim, and draws what files lack.

    Args:
        kind: The auto class that loads it.

    Raises:
        ModelError: The config claims more, or transformers cannot build it.
    """
    check_weights(directory)
    shapes, size_bytes = [], 0
    for path in sorted(directory.glob("*.safetensors")):
        size_bytes += path.stat().st_size
        with _open_file(path) as file:
            shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no mapping
    where = directory / "config.json"
    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            if (layers := getattr(config, "num_hidden_layers", 0)) > len(shapes):
                raise ModelError(
                    f"{where}: claims {layers} layers; the safetensors beside it hold {len(shapes)} tensors"
                )
            model = kind.from_config(config, trust_remote_code=False)
    except (OSError, *TRANSFORMERS_REFUSALS) as exc:
        raise ModelError(f"{where}: transformers cannot build it: {exc!s:.300}") from exc
    claimed = sum(parameter.numel() for parameter in model.parameters())
    # a number of four bits is the narrowest
    is_quantized = getattr(config, "quantization_config", None) is not None
    stored = 2 * size_bytes if is_quantized else sum(map(math.prod, shapes))
    if claimed > stored:
        raise ModelError(f"{where}: claims {claimed} numbers; the safetensors beside it hold {stored}")
    # masks and the like, which no file need hold
    table_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if table_bytes > max(_MAX_TABLE_BYTES, size_bytes):
        raise ModelError(
            f"{where}: claims tables of {table_bytes} bytes beside its weights; expected {_MAX_TABLE_BYTES} at most"
        )


def split_experts(family: Family, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Cut a tensor into the pieces that the hub's files hold, by their names; itself where they hold it whole."""
    pieces = family.expert_pieces(name)
    if not pieces:
        yield name, value
        return
    # one after the other: a config may claim more than could be listed
    for expert in range(len(value)):
        for piece, rows in zip(pieces, value[expert].chunk(len(pieces)), strict=True):
            yield piece.format(expert), rows


def _newer_name(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _older_name(name: str) -> str:
    """What the first BERTs, which came from another library, call a norm's numbers."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _check_header(file: Any, stored: str, path: Path, target: Tensor) -> None:
    header = _tensor_header(file, stored, path)
    if list(header.get_shape()) != list(target.shape):
        raise ModelError(
            f"{path}: tensor {stored!r} has shape {list(header.get_shape())}; config.json says {list(target.shape)}"
        )
    if header.get_dtype() not in _FLOATS:
        raise ModelError(
            f"{path}: tensor {stored!r} has type {header.get_dtype()}; expected one of {', '.join(sorted(_FLOATS))}"
        )


def _tensor_header(file: Any, stored: str, path: Path) -> Any:
    try:
        return file.get_slice(stored)
    except SafetensorError as exc:
        raise ModelError(f"{path}: tensor {stored!r} is named in {WEIGHTS_INDEX} but is not in the file") from exc


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{path}: cannot be read as safetensors: {exc}").with_facts(
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
