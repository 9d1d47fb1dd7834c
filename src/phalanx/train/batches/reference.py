"""Log-probabilities of a run's pairs under its reference model: computed once by the owner, stored, and verified."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.data import Batch
from phalanx.data.preferences import PairCorpus, PairRows
from phalanx.errors import CheckpointError
from phalanx.models import LoraConfig, ModelSource, Quantization, StageModule, StageSpec, build_stage
from phalanx.objectives.pairs import row_log_probs

REFERENCE_FILE = "reference.safetensors"
_MADE_OF = "made_of"
_PARTS = ("train", "held_out")
_ROWS_AT_ONCE = 8
_HIDDEN_BYTES = 1 << 29
"""Of hidden states that are kept while one stage after the other works on them; then the next rows have their turn."""


class ReferenceModel:
    """The model that a run begins with, without its adapter; of its stages one is in memory at a time.

    Args:
        source: Its files.
        attention: Kernel, as in training.
        seed: Of nothing that changes what stages compute here, but they ask for one.
        quantize: What frozen matrices are kept in, as in training.
    """

    def __init__(self, source: ModelSource, attention: str, seed: int, *, quantize: Quantization | None = None) -> None:
        self._source, self._seed, self._attention = source, seed, attention
        # an adapter that was not trained yet adds zeros
        self._quantized = None if quantize is None else LoraConfig(rank=1, quantize=quantize)

    @property
    def hidden_size(self) -> int:
        """Width of what passes between blocks."""
        return self._source.hidden_size

    @property
    def specs(self) -> list[StageSpec]:
        """One stage a block."""
        layers = self._source.num_layers
        return [StageSpec(layer, layers, layer, layer + 1) for layer in range(layers)]

    def stage(self, spec: StageSpec) -> StageModule:
        """Read one stage, to be run and let go."""
        return build_stage(
            self._source,
            spec,
            adapter=self._quantized,
            activation_checkpointing=False,
            attention="eager" if self._attention == "eager" else "sdpa",
            seed=self._seed,
        ).eval()

    def identity(self, corpus: PairCorpus) -> str:
        """Digest of all that decides log-probabilities of a corpus, libraries and machines apart."""
        made_of = [self._source.files_digest(), self._source.hub_config_dict, self._attention, corpus.digest]
        if self._quantized is not None:
            made_of.append(str(self._quantized.quantize))
        return hashlib.sha256(canonical_json(made_of)).hexdigest()


@torch.no_grad()
def log_probs_of(model: ReferenceModel, rows: PairRows) -> Tensor:
    """Return the log-probability of each row's answer, float32 ``[rows]``."""
    tokens = rows.ids.shape[1]
    batch = max(1, _HIDDEN_BYTES // (4 * model.hidden_size * tokens * _ROWS_AT_ONCE)) * _ROWS_AT_ONCE
    found: list[Tensor] = []
    for first in range(0, len(rows.ids), batch):
        stop = min(first + batch, len(rows.ids))
        parts = [rows.in_order(at, min(at + _ROWS_AT_ONCE, stop)) for at in range(first, stop, _ROWS_AT_ONCE)]
        found += _log_probs(model, parts)
    return torch.cat(found) if found else torch.zeros(0)


def _log_probs(model: ReferenceModel, parts: list[Batch]) -> list[Tensor]:
    hidden = [part.input_ids for part in parts]
    for spec in model.specs:
        stage = model.stage(spec)
        for number, part in enumerate(parts):
            hidden[number] = stage(hidden[number])
            if spec.is_last:
                hidden[number] = row_log_probs("reference", hidden[number], part.labels).total
    return hidden


def reference_log_probs(
    path: Path, corpus: PairCorpus, model: ReferenceModel, *, must_exist: bool
) -> Mapping[str, Tensor]:
    """Return the log-probabilities of both parts of a corpus: those that are stored, or computed now and stored.

    The owner computes them alone, from the model's files: no other party is asked, so none can lie.

    Args:
        path: The file.
        corpus: Pairs, without such a column yet.
        model: The reference.
        must_exist: The run goes on: they are read, and never computed again.

    Raises:
        CheckpointError: The file is missing, altered, or of another model or other pairs.
    """
    made_of = model.identity(corpus)
    if not path.is_file():
        if must_exist:
            raise CheckpointError(
                f"{path}: is missing, and a run that goes on does not compute its reference again; put it back, or "
                "begin a new run"
            )
        found = {name: log_probs_of(model, rows) for name, rows in zip(_PARTS, _rows(corpus), strict=True)}
        spare = path.with_suffix(".unfinished")
        save_file(found, spare, {_MADE_OF: made_of})
        os.replace(spare, path)
    return _stored(path, corpus, made_of)


def _rows(corpus: PairCorpus) -> tuple[PairRows, PairRows]:
    return corpus.train, corpus.held_out


def _stored(path: Path, corpus: PairCorpus, made_of: str) -> Mapping[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            told = (file.metadata() or {}).get(_MADE_OF)
            found = {name: file.get_tensor(name) for name in _PARTS}
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: cannot be read as what this run has stored: {exc}") from exc
    if told != made_of:
        raise CheckpointError(
            f"{path}: is of another model or of other pairs ({str(told)[:16]}..., expected {made_of[:16]}...); resume "
            "with the model and the data of the run"
        )
    for name, rows in zip(_PARTS, _rows(corpus), strict=True):
        if found[name].shape != (len(rows.ids),) or found[name].dtype != torch.float32:
            raise CheckpointError(f"{path}: {name} has {list(found[name].shape)} numbers, expected {len(rows.ids)}")
    return found
