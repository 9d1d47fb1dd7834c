"""A model on disk: its config, its tokenizer, and its tensors read by name."""

import copy
import hashlib
import importlib.metadata
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import ModelError
from phalanx.models.cache import save_hub_layout, written_once
from phalanx.models.config import ModelConfig
from phalanx.models.directory import TOKENIZER, model_directory, read_config
from phalanx.models.families import (
    TRANSFORMERS_REFUSALS,
    config_with_head,
    family_of,
    head_of,
    hub_config_dict,
    parse_hub_config,
)
from phalanx.models.hub_files import copy_tokenizer, find_tokenizer, tokenizer_companions
from phalanx.models.packaged import open_packaged
from phalanx.models.quiet import quiet_transformers
from phalanx.models.seeding import NormalDraws
from phalanx.models.weights import WeightFiles
from phalanx.planner.model.shape import HeadKind


def write_random_model(hub_config: Any, seed: int, cache_dir: Path, tokenizer: Path | None) -> Path:
    """Draw a model and write it to the cache in the hub's layout, unless it is there already.

    The directory is named after config, seed, tokenizer and the versions of torch and transformers, so equal
    names mean equal bytes.

    Args:
        seed: Seed of torch's generator, which is left as it was found.
        tokenizer: A tokenizer.json to put beside the weights with its companions, if it exists.
    """
    has_tokenizer = tokenizer is not None and tokenizer.is_file()
    key: dict[str, Any] = {
        "config": hub_config_dict(hub_config),
        "seed": seed,
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer and has_tokenizer else None,
        "normal_draws": "inverse distribution function",
        "versions": list(_library_versions()),
    }
    companions = list(tokenizer_companions(tokenizer.parent)) if tokenizer and has_tokenizer else []
    if companions:
        key["companions"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in companions}
    name = f"scratch-{hub_config.model_type}-{hashlib.sha256(canonical_json(key)).hexdigest()[:32]}"

    def write(directory: Path) -> None:
        model = _draw_model(hub_config, seed)
        save_hub_layout(model, hub_config_dict(model.config), directory)
        if tokenizer and has_tokenizer:
            copy_tokenizer(tokenizer, directory)

    return written_once(cache_dir / name, write)


@cache
def _library_versions() -> tuple[str, ...]:
    """Return the versions of torch and transformers; to read each from its metadata takes milliseconds."""
    return tuple(importlib.metadata.version(name) for name in ("torch", "transformers"))


def _draw_model(hub_config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), quiet_transformers(), NormalDraws():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
        try:
            return family_of(hub_config.model_type, "model config").whole_model(hub_config)
        except TRANSFORMERS_REFUSALS as exc:
            raise ModelError(f"model config: {hub_config.model_type} cannot be built from it: {exc}") from exc


class ModelSource:
    """A model directory in the hub's layout.

    Args:
        cache_dir: Directory for a tokenizer.json that is converted from the older form; None converts none.
        weightless: It has no weights, which lie in a checkpoint.

    Attributes:
        tokenizer_path: Its tokenizer.json, or the one made from vocab.json and merges.txt, or None.

    Raises:
        ModelError: No or malformed config.json, unknown family, no safetensors.
    """

    def __init__(self, directory: Path, cache_dir: Path | None = None, *, weightless: bool = False) -> None:
        self.directory = directory
        self.hub_config = read_hub_config(directory)
        self.family = family_of(self.hub_config.model_type, str(directory / "config.json"))
        path = directory / TOKENIZER
        self.tokenizer_path = find_tokenizer(directory, cache_dir) if cache_dir else path if path.is_file() else None
        ties_head = self.family.ties_head(self.hub_config)
        self._weights = WeightFiles(directory, self.family, ties_head=ties_head, weightless=weightless)
        layers = self.family.num_layers(self.hub_config)
        if not weightless and layers > self._weights.num_tensors:
            raise ModelError(
                f"{directory}/config.json: claims {layers} layers; the safetensors beside it hold "
                f"{self._weights.num_tensors} tensors"
            )

    @property
    def hub_config_dict(self) -> dict[str, Any]:
        """The config as plain JSON data, from which ``build_empty_stage`` builds elsewhere."""
        return hub_config_dict(self.hub_config)

    @property
    def num_layers(self) -> int:
        """Blocks of the whole model."""
        return self.family.num_layers(self.hub_config)

    @property
    def hidden_size(self) -> int:
        """Width of what passes between stages."""
        return int(self.hub_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.hub_config.vocab_size)

    def with_first_blocks(self, num_layers: int) -> "ModelSource":
        """Return the model of its first blocks alone, with the same embedding, norm and head; no tensor is copied."""
        if not 1 <= num_layers <= self.num_layers:
            raise ModelError(f"{self.directory}: has {self.num_layers} blocks; {num_layers} of them were asked for")
        if self.family.facts.predicts == "target":
            raise ModelError(f"model.layers: {self.family.model_type} is an encoder and a decoder; remove it")
        short = copy.copy(self)
        short.hub_config = copy.deepcopy(self.hub_config)
        short.hub_config.num_hidden_layers = num_layers
        for key in ("layer_types", "no_rope_layers"):
            if getattr(short.hub_config, key, None) is not None:
                setattr(short.hub_config, key, list(getattr(short.hub_config, key))[:num_layers])
        return short

    @property
    def head_kind(self) -> HeadKind:
        """What the last stage gives for each token."""
        return head_of(self.hub_config)

    def with_head(self, kind: HeadKind) -> "ModelSource":
        """Return the model with another head; a score head that the files have not is drawn where a stage is built."""
        if kind == self.head_kind:
            return self
        if self.head_kind == "score":
            raise ModelError(f"{self.directory}: gives scores, and has no language model's head; take another model")
        other = copy.copy(self)
        other.hub_config = config_with_head(self.hub_config, kind, str(self.directory))
        return other

    def files_digest(self) -> str:
        """Return the SHA-256, in hex, over names and contents of its config and its safetensors files."""
        total = hashlib.sha256()
        for path in sorted([self.directory / "config.json", *self.directory.glob("*.safetensors")]):
            with path.open("rb") as file:
                total.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def has_tensor(self, name: str) -> bool:
        """Whether the files have a tensor of that name."""
        return self._weights.has_weight(name)

    def tensor_shape(self, name: str) -> list[int]:
        """Return the shape of one tensor of the files."""
        return self._weights.weight_shape(name)

    def unused_tensors(self, wanted: Collection[str]) -> list[str]:
        """Return the tensors of the files that are none of these."""
        return self._weights.unused_names(wanted)

    def check_names(self, wanted: Collection[str]) -> None:
        """Refuse files in which another program may find others of these tensors than this one.

        Raises:
            ModelError: A tensor is there by two names, or head and embedding are tied and differ.
        """
        other = self._weights.shadowing_name(wanted)
        if other is not None:
            raise ModelError(
                f"{self.directory}: has a tensor by two names, one of them {other!r:.200}: programs would load "
                "different ones; remove it"
            )
        if self.family.ties_head(self.hub_config):
            self.check_tied()

    def read_tensor(self, name: str) -> Tensor:
        """Return one tensor as float32 in memory of its own."""
        tensor = torch.empty(self._weights.weight_shape(name), dtype=torch.float32)
        self._weights.load_into({name: tensor})
        return tensor

    def load_into(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors from the files, converting to their dtype and device; nothing else is read."""
        self._weights.load_into(wanted)

    def check_shapes(self, wanted: Mapping[str, Tensor]) -> None:
        """Compare shapes, of tensors without memory too, with the files; as `WeightFiles.check_shapes`."""
        self._weights.check_shapes(wanted)

    def check_tied(self) -> None:
        """Refuse a directory with a config that ties the head to the embedding and files that disagree."""
        embedding, head = self.family.embedding_weight, self.family.head_weight
        if self._weights.stored_name(head) == self._weights.stored_name(embedding):
            # the files hold one of the two
            return
        if not torch.equal(self.read_tensor(head), self.read_tensor(embedding)):
            raise ModelError(
                f"{self.directory}: config.json ties {head} to {embedding}, but the files hold "
                "different values; set tie_word_embeddings to false in config.json"
            )


def open_model(config: ModelConfig, cache_dir: Path, seed: int) -> ModelSource:
    """Open the model that a config names; a packaged or random one is first written to the cache, once.

    Args:
        cache_dir: Directory of written models; made if it does not exist.
        seed: Seed of random weights. The same seed and versions of torch and transformers give the same bytes, for any
            later cut into stages.

    Raises:
        ModelError: The model is missing, malformed, of an unknown family, has fewer layers than are asked for, or
            cannot have the head.
    """
    source = _open_whole(config, cache_dir, seed)
    source = source if config.layers is None else source.with_first_blocks(config.layers)
    return source if config.head is None else source.with_head(config.head)


def _open_whole(config: ModelConfig, cache_dir: Path, seed: int) -> ModelSource:
    if config.name is not None:
        return ModelSource(open_packaged(config.name, cache_dir))
    if not config.from_scratch:
        return ModelSource(model_directory(config.path or ""), cache_dir)
    tokenizer = None
    if config.architecture is not None:
        hub_config = parse_hub_config(config.architecture, "model.architecture", refuse_unknown=True)
    else:
        directory = model_directory(config.path or "")
        hub_config = read_hub_config(directory)
        tokenizer = find_tokenizer(directory, cache_dir)
    return ModelSource(write_random_model(hub_config, seed, cache_dir, tokenizer))


def read_hub_config(directory: Path) -> Any:
    """Read a directory's config.json into transformers' config object."""
    return parse_hub_config(read_config(directory), str(directory / "config.json"))
