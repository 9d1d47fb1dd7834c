"""Exact erasure: a run is replayed from the checkpoint before a document was first seen, on data without it.

The replayed weights equal a run that never had the document, bit for bit. Whoever holds the old weights, the old
data set or the old checkpoints still holds the document: these are to be deleted, and no program can prove that.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.checkpoint import Checkpoint
from phalanx.config import canonical_json
from phalanx.data import BatchLoader, Corpus, prepare_corpus
from phalanx.data.shards import (
    Dataset,
    SealKey,
    default_signing_key,
    fingerprint_of,
    load_signer,
    open_dataset,
)
from phalanx.data.shards.erased import write_erased
from phalanx.data.shards.lookup import find_document
from phalanx.data.shards.proof import DocumentPlace, check_proof, prove_document
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.governance.publication import read_summary
from phalanx.train import PastRun
from phalanx.train.config import DomainRun, PipelineRun, RunConfig
from phalanx.train.entry import replay
from phalanx.train.records.lineage import dataset_of, trace_document
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.sessions.continue_from import note_verdicts

RECORD_FILE = "erasure.json"
_REMARKS = (
    "the old run, its checkpoints and exports, and the old data set still hold the document: delete them",
    "a tokenizer that was trained on the document keeps its vocabulary",
    "the number of tokens and the place of the document stay known; copies with another text are other documents",
)


@dataclass(frozen=True)
class ErasurePrice:
    """What an erasure costs, known before it begins.

    Attributes:
        places: Number of its places in the data set.
        first_step: First step that was trained on it; None if none was: then only the data set is written anew.
        num_seen: Number of steps that were trained on it.
        from_step: Step of the checkpoint at which the replay begins; 0 is the beginning.
        seconds: Time that the old run took for as many steps; None without a summary.
    """

    document: str
    places: int
    first_step: int | None
    num_seen: int
    from_step: int
    steps: int
    tokens: int
    seconds: float | None
    remarks: tuple[str, ...] = _REMARKS

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


class Erasure:
    """The erasure of one document from a run.

    Args:
        document: A digest, a file with its text, or its name in the data set.

    Raises:
        DataError: The run was not trained from a data set of documents, or the document is not in it.
        ConfigError: The run is of a kind that cannot be replayed from a checkpoint.
    """

    def __init__(self, past: PastRun, document: str) -> None:
        self.past = past
        self.dataset, self._key = open_trained_data(past)
        self.digest = find_document(self.dataset, document).digest
        self._places = find_places(self.dataset, self.digest)
        if not self._places:
            raise DataError(f"{self.dataset.directory}: has no document {self.digest}; nothing is to be erased")
        self._lineage = trace_document(past, self._places)

    def estimate_price(self) -> ErasurePrice:
        """Return the cost of the replay."""
        train, seen = self.past.config.train, [step.step for step in self._lineage.steps]
        first = min(seen, default=None)
        begin = self._start_step(first)
        done = self._lineage.steps_done
        steps = 0 if first is None else done - begin
        summary = read_summary(self.past.path)
        wall, trained = summary.get("wall_s"), summary.get("steps")
        seconds = None
        if isinstance(wall, int | float) and isinstance(trained, int) and trained > 0:
            seconds = round(float(wall) / trained * steps, 1)
        return ErasurePrice(
            document=self.digest,
            places=len(self._places),
            first_step=first,
            num_seen=len(seen),
            from_step=begin,
            steps=steps,
            tokens=steps * train.batch_size * self.past.config.data.sequence_length,
            seconds=seconds,
        )

    def _start_step(self, first: int | None) -> int:
        """Return the step of the last checkpoint that holds nothing of the document; 0 where none is left."""
        if first is None:
            return self._lineage.steps_done
        return max((step for step in self.past.certified_steps if step <= first), default=0)

    def erase_document(self, data_out: Path, run_out: Path, console: Console | None = None) -> dict[str, Any]:
        """Write the data set without the document, and replay the run without it.

        Args:
            data_out: New directory of the data set.
            run_out: New directory of the run; nothing is replayed where no step saw the document.

        Returns:
            The record, which also lies in `run_out`.
        """
        signer = load_signer(default_signing_key())
        manifest = write_erased(self.dataset, {self.digest}, data_out, signer, self._key)
        erased = open_dataset(data_out, fingerprint_of(signer), self._key)
        absence = prove_document(erased, self.digest)
        if check_proof(absence, str(data_out)).places:
            raise DataError(f"{data_out}: still has the document")
        price = self.estimate_price()
        record = {
            **price.to_json(),
            "run": self.past.run_id,
            "old_dataset": self.dataset.digest,
            "new_dataset": erased.digest,
            "documents": manifest.documents,
            "proof_of_absence": json.loads(absence.to_bytes()),
        }
        if price.first_step is None:
            return record
        run = self._run_without(data_out, fingerprint_of(signer))
        summary = replay(run, run_out, self._find_origin(run, price.from_step), console)
        if summary["status"] != "completed":
            raise CheckpointError(
                f"{run_out}: the replay is {summary['status']}, so nothing is erased yet; "
                "remove it and the new data set, and erase again"
            )
        weights = summary["final_weights_digest"]
        record |= {"new_run": PastRun(run_out).run_id, "final_weights_digest": weights}
        (run_out / RECORD_FILE).write_bytes(canonical_json(record) + b"\n")
        return record

    def _run_without(self, data_out: Path, signer: str) -> RunConfig:
        run = self.past.config
        if run.data.dataset is None:
            raise ConfigError(f"{self.past.path}: was not trained from a data set")
        dataset = run.data.dataset.model_copy(update={"path": data_out.absolute(), "signer": signer})
        update: dict[str, Any] = {"data": run.data.model_copy(update={"dataset": dataset})}
        if isinstance(run, PipelineRun):
            # a drill's liar is no part of what is replayed: no lie is in the weights
            update["attack"] = type(run.attack)()
        return run.model_copy(update=update)

    def _find_origin(self, run: RunConfig, step: int) -> Checkpoint | None:
        """Open the checkpoint of a step, with the position in the order of the new data."""
        if step == 0:
            return None
        checkpoint = self.past.open_verified(step)
        cache = cache_beside(self.past.path)
        corpus = prepare_corpus(run.data, cache / "data", run.train.seed, None)
        position = checkpoint.state.get("loader")
        if not isinstance(corpus, Corpus) or not isinstance(position, dict) or "num_samples" not in position:
            raise CheckpointError(f"{checkpoint.path}: its batches were not drawn in an order that can be replayed")
        loader = BatchLoader(corpus, run.train.draws_per_step, run.train.seed)
        while loader.position_state()["num_samples"] < position["num_samples"]:
            loader.next_sequences()
        fresh = loader.position_state()
        if set(fresh) != set(position) or fresh["num_samples"] != position["num_samples"]:
            raise CheckpointError(f"{checkpoint.path}: its batches were not drawn in an order that can be replayed")
        checkpoint.state["loader"] = fresh
        note_verdicts(checkpoint, self.past)
        return checkpoint


def open_shards(pasts: Sequence[PastRun], document: str) -> list[Erasure]:
    """Open the erasures from runs that were trained apart, each on a shard of the data.

    Args:
        document: A digest or a file with its text; a name means another document in another data set.

    Returns:
        An erasure for each run whose data has the document; of the others nothing is replayed.

    Raises:
        DataError: None has it.
        ConfigError: A run is of a kind that cannot be replayed, or the document is given by a name.
    """
    datasets = [open_trained_data(past)[0] for past in pasts]
    named = [find_document(dataset, document) for dataset in datasets]
    if any(place.named_by == "name" for place in named):
        raise ConfigError(f"{document!r:.200}: is a name of one data set; for several runs give its digest or its text")
    holders = [
        past for past, dataset, place in zip(pasts, datasets, named, strict=True) if find_places(dataset, place.digest)
    ]
    if not holders:
        raise DataError(f"{document:.200}: is in the data of none of these runs; nothing is to be erased")
    return [Erasure(past, document) for past in holders]


def open_trained_data(past: PastRun) -> tuple[Dataset, SealKey | None]:
    """Open the data set of a run that can be replayed, with the key that it is encrypted with.

    Raises:
        ConfigError: The run is of another kind, or was not trained from a data set.
    """
    run = past.config
    if not isinstance(run, PipelineRun | DomainRun) or run.data.dataset is None:
        raise ConfigError(f"{past.path}: erasure replays pipeline and domain runs that were trained from a data set")
    path, named = dataset_of(past)
    key = None if named.key_file is None else SealKey.from_file(named.key_file)
    return open_dataset(path, named.signer, key), key


def find_places(dataset: Dataset, digest: str) -> tuple[DocumentPlace, ...]:
    """Return the places of a document in a data set, by a proof that is checked."""
    return check_proof(prove_document(dataset, digest), str(dataset.directory)).places
