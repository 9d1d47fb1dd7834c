"""The steps of a run that saw a document: computed from the order, and compared with the commitments in the log."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint import list_checkpoints
from phalanx.data import BatchLoader, Corpus, DataConfig, SequenceLayout, open_corpus, prepare_corpus
from phalanx.data.chat_corpus import open_conversations
from phalanx.data.config import ModelTokenizerConfig
from phalanx.data.phases import DatasetConfig
from phalanx.data.run_dataset import local_dataset
from phalanx.data.shards.proof import DocumentPlace
from phalanx.errors import DataError
from phalanx.models import open_model
from phalanx.security.audit.line import read_entries
from phalanx.telemetry import read_metrics
from phalanx.train.config import RunConfig, SplitRun
from phalanx.train.records.audit_trail import LOG_FILE
from phalanx.train.records.history import FELL_BACK
from phalanx.train.records.past_run import PastRun
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.records.samples import samples_digest
from phalanx.train.runs.mixed import MixedBase

TRAIN = "train"


@dataclass(frozen=True)
class SeenStep:
    """One step that was given the document.

    Attributes:
        step: Its number, from 0.
        sequences: Those of its batch that have tokens of the document.
        committed_in: Place of an equal digest of the whole batch's sequence numbers: "log", which is signed, "metrics",
            which is not, or "" in runs from before such digests were written.
    """

    step: int
    sequences: tuple[int, ...]
    committed_in: str


@dataclass(frozen=True)
class DocumentLineage:
    """What a run has seen of a document.

    Attributes:
        corpus: SHA-256 of all that it drew from.
        corpus_in_log: Whether the signed log names it.
        checkpoints: Steps of its checkpoints that are there and hold one of these steps.
    """

    run: str
    corpus: str
    corpus_in_log: bool
    steps_done: int
    steps: tuple[SeenStep, ...]
    checkpoints: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


@dataclass
class _StepDigests:
    """What the log and the metrics say of the run's data."""

    corpora: set[str]
    logged: dict[int, str]
    metrics: dict[int, str | None]
    given_up: dict[int, int]
    """Batches of a step that failed before the one it was applied with."""


def dataset_of(past: PastRun, moved_to: Path | None = None) -> tuple[Path, DatasetConfig]:
    """Return the dataset of a run, or its new place, with the config's entry for it; or the dataset that the run made.

    Raises:
        DataError: The run drew from no shards, or is a split run; or its own are gone, and so are its sources.
    """
    data = past.config.data
    if isinstance(past.config, SplitRun):
        raise DataError(f"{past.path}: is a split run: only the clients have its texts")
    if isinstance(past.config, MixedBase) and past.config.objectives:
        raise DataError(f"{past.path}: learned [[objectives]]; documents are followed through runs of one objective")
    if data.dataset is None and not data.sources and data.conversations is None:
        raise DataError(f"{past.path}: was not trained from shards, which are needed to find documents")
    if moved_to is not None:
        path = moved_to
    elif data.dataset is not None:
        # what looks at a run afterwards reads files; tokens that were streamed are brought whole
        path = local_dataset(data.dataset.model_copy(update={"stream": None}), cache_beside(past.path) / "data")
    else:
        path = _prepare_corpus(past.config, cache_beside(past.path), data).tokenizer_path.parent
    return path, (data.dataset or DatasetConfig(path=path)).model_copy(update={"path": path, "stream": None})


def trace_document(past: PastRun, places: Sequence[DocumentPlace], moved_to: Path | None = None) -> DocumentLineage:
    """Say in which steps of a run a document was seen.

    Args:
        moved_to: Present directory of the dataset; the config's when None.
    """
    run = past.config
    path, dataset = dataset_of(past, moved_to)
    corpus = open_run_corpus(run, cache_beside(past.path), path, dataset)
    lines = _read_digests(past)
    if lines.corpora - {corpus.digest}:
        raise DataError(
            f"{past.path}: its log names the corpus {min(lines.corpora)[:16]}..., the dataset gives "
            f"{corpus.digest[:16]}...; give the dataset that the run was trained from"
        )
    wanted_sequences = {
        sequence
        for place in places
        if place.split == TRAIN
        for sequence in corpus.sequences_of(place.group, place.start, place.start + place.tokens)
    }
    steps = tuple(_seen_steps(_replay_batches(corpus, run, lines), wanted_sequences, lines, past.path))
    first = min((seen.step for seen in steps), default=None)
    later_checkpoints = (
        () if first is None else tuple(step for step in sorted(list_checkpoints(past.checkpoints)) if step > first)
    )
    return DocumentLineage(
        past.run_id, corpus.digest, bool(lines.corpora), len(lines.metrics), steps, later_checkpoints
    )


def open_run_corpus(run: RunConfig, cache: Path, path: Path, dataset: DatasetConfig) -> Corpus:
    """Open the data that a run drew from, at its present place."""
    if run.data.dataset is not None:
        return _prepare_corpus(run, cache, run.data.model_copy(update={"dataset": dataset}))
    opens = open_corpus if run.data.sources else open_conversations
    return opens(path, SequenceLayout.from_config(run.data))


def _prepare_corpus(run: RunConfig, cache: Path, data: DataConfig) -> Corpus:
    tokenizer = None
    if isinstance(run.data.tokenizer, ModelTokenizerConfig):
        tokenizer = open_model(run.model, cache / "models", run.train.seed).tokenizer_path
    return prepare_corpus(data, cache / "data", run.train.seed, tokenizer)


def _read_digests(past: PastRun) -> _StepDigests:
    rows = read_metrics(past.path / "metrics.jsonl")
    lines_found = _StepDigests(set(), {}, {int(row["step"]): row.get("samples_digest") for row in rows}, {})
    path = past.path / LOG_FILE
    with path.open("rb") as file:
        for entry in read_entries(file, path, past.owner, past.run_id):
            body = entry.body
            if entry.kind in ("run_started", "run_resumed") and "corpus" in body:
                lines_found.corpora.add(str(body["corpus"]))
            elif entry.kind == "step" and "samples" in body:
                lines_found.logged[int(body["step"])] = str(body["samples"])
            elif entry.kind == "batch_skipped":
                step, number = int(body["step"]), int(body["number"])
                lines_found.given_up[step] = max(number, lines_found.given_up.get(step, 0))
            elif entry.kind == FELL_BACK:
                # what is given up when these steps are done again is told again
                lines_found.given_up = {
                    step: number for step, number in lines_found.given_up.items() if step < int(body["to_step"])
                }
    return lines_found


def _replay_batches(corpus: Corpus, run: RunConfig, lines: _StepDigests) -> Iterator[tuple[int, list[int]]]:
    """Yield every step that was done with the sequences of the batch that it was applied with."""
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    for step in range(max(lines.metrics, default=-1) + 1):
        for _ in range(lines.given_up.get(step, 0)):
            loader.next_sequences()
        yield step, loader.next_sequences()


def _seen_steps(
    batches: Iterator[tuple[int, list[int]]], wanted: set[int], lines: _StepDigests, home: Path
) -> Iterator[SeenStep]:
    sources: dict[str, Mapping[int, str | None]] = {"log": lines.logged, "metrics": lines.metrics}
    for step, sequences in batches:
        stated_digests = {name: source[step] for name, source in sources.items() if source.get(step) is not None}
        digest = samples_digest(sequences) if stated_digests else ""
        odd = [name for name, digest_text in stated_digests.items() if digest_text != digest]
        if odd:
            raise DataError(
                f"{home}: step {step} {odd[0]} has other samples than the order of the run's config; config.toml, "
                "the dataset or that file does not belong to the run"
            )
        seen_sequences = tuple(sequence for sequence in sequences if sequence in wanted)
        if seen_sequences:
            yield SeenStep(step, seen_sequences, next(iter(stated_digests), ""))
