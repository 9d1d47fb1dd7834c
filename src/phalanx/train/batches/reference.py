"""Log-probabilities of a run's pairs under its reference model: computed once by the owner, stored, and verified."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.data.preferences import PairCorpus, PairRows
from phalanx.errors import CheckpointError
from phalanx.models import LoraConfig, ModelSource, Quantization, StageModule, StageSpec, build_stage
from phalanx.objectives.pairs import row_log_probs
from phalanx.telemetry import RowsTold

REFERENCE_FILE = "reference.safetensors"
_MADE_OF, _DIGEST = "made_of", "sha256"
_HALVES = ("train", "held_out")
_ROWS_AT_ONCE = 8
_HIDDEN_BYTES = 1 << 29
"""Of hidden states that are kept while one stage after the other works on them; then the next rows have their turn.

Also the size of a part: a smaller one loses less when the process is killed, and loads the model more often."""


class ReferenceModel:
    """The model that a run begins with, without its adapter; of its stages one is in memory at a time.

    Args:
        seed: Seed of the build; the computed values do not depend on it.
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
    def stage_specs(self) -> list[StageSpec]:
        """One stage a block."""
        layers = self._source.num_layers
        return [StageSpec(layer, layers, layer, layer + 1) for layer in range(layers)]

    def read_stage(self, spec: StageSpec) -> StageModule:
        """Read one stage, to be run and let go."""
        return build_stage(
            self._source,
            spec,
            adapter=self._quantized,
            activation_checkpointing=False,
            attention="eager" if self._attention == "eager" else "sdpa",
            seed=self._seed,
        ).eval()

    def content_digest(self, corpus: PairCorpus) -> str:
        """Digest of all that decides log-probabilities of a corpus, libraries and machines apart."""
        made_of = [self._source.files_digest(), self._source.hub_config_dict, self._attention, corpus.digest]
        if self._quantized is not None:
            made_of.append(str(self._quantized.quantize))
        return hashlib.sha256(canonical_json(made_of)).hexdigest()


@torch.no_grad()
def log_probs_of(model: ReferenceModel, rows: PairRows) -> Tensor:
    """Return the log-probability of each row's answer, float32 ``[rows]``."""
    parts = [_log_probs(model, rows, first, stop) for first, stop in _group_borders(model, rows)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _group_borders(model: ReferenceModel, rows: PairRows) -> list[tuple[int, int]]:
    """Cut rows into groups that go through the model together: whole multiples of jointly computed rows."""
    of_eight = 4 * model.hidden_size * rows.ids.shape[1] * _ROWS_AT_ONCE
    batch = max(1, _HIDDEN_BYTES // of_eight) * _ROWS_AT_ONCE
    return [(first, min(first + batch, len(rows.ids))) for first in range(0, len(rows.ids), batch)]


@torch.no_grad()
def _log_probs(model: ReferenceModel, rows: PairRows, first: int, stop: int) -> Tensor:
    parts = [rows.rows_between(start, min(start + _ROWS_AT_ONCE, stop)) for start in range(first, stop, _ROWS_AT_ONCE)]
    hidden = [part.input_ids for part in parts]
    for spec in model.stage_specs:
        stage = model.read_stage(spec)
        for number, part in enumerate(parts):
            hidden[number] = stage(hidden[number])
            if spec.is_last:
                hidden[number] = row_log_probs("reference", hidden[number], part.labels).total
    return torch.cat(hidden)


@dataclass(frozen=True)
class ReferenceStore:
    """The place in a run directory where a reference's log-probabilities are kept.

    Attributes:
        path: File of all log-probabilities; while they are computed, finished ones lie in a directory beside it.
        must_exist: The run goes on: they are read, and never computed again.
    """

    path: Path
    must_exist: bool
    told: RowsTold = lambda _done, _of: None

    @property
    def parts_directory(self) -> Path:
        """Return the directory of finished parts while the rest is computed."""
        return self.path.with_suffix(".parts")


def reference_log_probs(store: ReferenceStore, corpus: PairCorpus, model: ReferenceModel) -> Mapping[str, Tensor]:
    """Return the log-probabilities of both parts of a corpus: the stored ones, or computed now and stored.

    The owner computes them alone, from the model's files: no other party is asked, so none can lie. A kill while they
    are computed loses the rows under way, and no stored ones.

    Args:
        corpus: Pairs, without such a column yet.
    """
    made_of, path = model.content_digest(corpus), store.path
    if not path.is_file():
        if store.must_exist:
            raise CheckpointError(
                f"{path}: is missing, and a resumed run does not compute its reference again; restore it, or begin "
                "a new run"
            )
        _write_columns(path, _compute_columns(store, corpus, model, made_of), made_of)
    log_probs = _read_columns(path, made_of, {name: len(rows.ids) for name, rows in _corpus_halves(corpus)})
    shutil.rmtree(store.parts_directory, ignore_errors=True)
    return log_probs


def _corpus_halves(corpus: PairCorpus) -> list[tuple[str, PairRows]]:
    return list(zip(_HALVES, (corpus.train, corpus.held_out), strict=True))


def _compute_columns(
    store: ReferenceStore, corpus: PairCorpus, model: ReferenceModel, made_of: str
) -> dict[str, Tensor]:
    store.parts_directory.mkdir(exist_ok=True)
    done, rows_in_all = 0, sum(len(rows.ids) for _, rows in _corpus_halves(corpus))
    parts_by_name: dict[str, list[Tensor]] = {name: [torch.zeros(0)] for name in _HALVES}
    store.told(0, rows_in_all)
    for name, rows in _corpus_halves(corpus):
        for first, stop in _group_borders(model, rows):
            path = store.parts_directory / f"{name}-{first}-{stop}.safetensors"
            if not path.is_file():
                _write_columns(path, {name: _log_probs(model, rows, first, stop)}, made_of)
            parts_by_name[name].append(_read_columns(path, made_of, {name: stop - first})[name])
            done += stop - first
            store.told(done, rows_in_all)
    return {name: torch.cat(parts) for name, parts in parts_by_name.items()}


def _write_columns(path: Path, columns: Mapping[str, Tensor], made_of: str) -> None:
    spare = path.with_suffix(".unfinished")
    with spare.open("wb") as file:
        file.write(save(dict(columns), {_MADE_OF: made_of, _DIGEST: _columns_digest(path.name, columns)}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(spare, path)


def _columns_digest(file: str, columns: Mapping[str, Tensor]) -> str:
    # a part's name tells its rows
    total = hashlib.sha256(file.encode())
    for name, column in sorted(columns.items()):
        total.update(f"{name} {len(column)} ".encode() + column.contiguous().numpy().tobytes())
    return total.hexdigest()


def _read_columns(path: Path, made_of: str, expected: Mapping[str, int]) -> Mapping[str, Tensor]:
    """Read a file of `_write_columns`; `expected` has the length of each column."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in expected}
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: is not a reference file of this run: {exc}") from exc
    if metadata.get(_MADE_OF) != made_of:
        raise CheckpointError(
            f"{path}: belongs to another model or to other pairs ({str(metadata.get(_MADE_OF))[:16]}..., expected "
            f"{made_of[:16]}...); resume with the model and the data of the run"
        )
    for name, rows in expected.items():
        if tensors[name].shape != (rows,) or tensors[name].dtype != torch.float32:
            raise CheckpointError(f"{path}: {name} has {list(tensors[name].shape)} numbers, expected {rows}")
    # a finished file of an older release tells none, and the signed log names what it holds
    if _DIGEST in metadata and metadata[_DIGEST] != _columns_digest(path.name, tensors):
        raise CheckpointError(
            f"{path}: its numbers differ from those written; restore it, or delete it if the run has not begun"
        )
    return tensors
