"""A whole build: passes over all pieces, decisions between them, a vocabulary, tokens, and the dataset at the end."""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.data.build.all_passes import BuildProgress, NoProgress, report_results, run_passes
from phalanx.data.build.decision import Summary
from phalanx.data.build.encoding import EOS, TOKENIZER, training_texts
from phalanx.data.build.finish import DatasetFinisher
from phalanx.data.build.local import BuildEngine, open_local
from phalanx.data.build.look import read_report
from phalanx.data.build.passes import code_digest, tool_versions
from phalanx.data.build.pieces import PieceReader, SourcePiece, list_pieces
from phalanx.data.build.recipe import DataRecipe, ModelVocabulary, Training
from phalanx.data.build.records import RecordFile, decode_document, import_zstd
from phalanx.data.build.sift import DOCUMENTS
from phalanx.data.build.steps import step_settings
from phalanx.data.build.store import WorkStore, not_written, work_key
from phalanx.data.build.tally import ByteTally
from phalanx.data.build.work import BuildWorker
from phalanx.data.config import FileTokenizerConfig, ModelTokenizerConfig
from phalanx.data.shards import DATASET_FILE, SealKey, open_dataset
from phalanx.data.sources import no_text
from phalanx.data.sources.listing import is_empty
from phalanx.data.tokenizers import TextTokenizer, load_tokenizer, train_tokenizer
from phalanx.errors import DataError, InputError

FileDigests = list[tuple[str, str]]
WORK = ".work"
"""Finished pieces of a build that goes on, inside of the dataset's directory."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; none of them changes a byte of the result."""

    open_engine: Callable[[BuildWorker], AbstractContextManager[BuildEngine]] = open_local
    code_home: Path = Path()
    progress: BuildProgress = field(default_factory=NoProgress)


@dataclass(frozen=True)
class BuildResult:
    """What a build came to.

    Attributes:
        report: Contents of ``report.json``.
    """

    directory: Path
    digest: str
    report: dict[str, Any]
    already_existed: bool = False


def build_recipe(recipe: DataRecipe, directory: Path, options: BuildOptions | None = None) -> BuildResult:
    """Build a dataset, or go on where an earlier call was cut off.

    Args:
        directory: Directory of the dataset; an unfinished build keeps its pieces in it.

    Raises:
        DataError: A source is missing or malformed, an extra is not installed, the account does not add up, or the
            directory holds another dataset.

    Guarantees:
        The same files, recipe and versions give the same bytes, whatever engine, the number of workers, and the
        moments at which earlier calls were killed; encrypted shards have a new key each time. Until the build is over
        there is no manifest.
    """
    options = options or BuildOptions()
    import_zstd()
    return _Build(recipe, directory, options).run_build()


@dataclass
class _Build:
    recipe: DataRecipe
    directory: Path
    options: BuildOptions

    def run_build(self) -> BuildResult:
        home = self.directory / WORK
        worker = BuildWorker(self.recipe, home, self.options.code_home)
        # an extra that is missing is told before anything is read
        worker.step_rules  # noqa: B018
        self.options.progress.begin_phase("list", 1, 0)
        pieces = list_pieces(self.recipe, worker.open_recipe_source)
        if (self.directory / DATASET_FILE).exists():
            return self._existing_result(self._inputs_digest(pieces, self._piece_digests(worker, pieces)), home)
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise DataError(f"{home}: cannot be created ({exc.strerror}); choose another place with --out") from exc
        with _lock_directory(home):
            return self._build_pieces(worker, pieces, home)

    def _nothing_left(self) -> DataError:
        for source in self.recipe.sources:
            if is_empty(getattr(source, "path", "")):
                return no_text(source)
        return DataError(
            f"{self.directory}: no document of the sources is left; `--dry-run` prints the steps that drop them"
        ).with_facts(code="PHX-I012", do="check --dry-run, relax a step, or add text")

    def _build_pieces(self, worker: BuildWorker, pieces: Sequence[SourcePiece], home: Path) -> BuildResult:
        with self.options.open_engine(worker) as engine:
            done = run_passes(worker, engine, pieces, self.options.progress)
            last = [summaries[-1]["key"] for summaries in done]
            if not any(summaries[-1]["documents"] for summaries in done):
                raise self._nothing_left()
            tokenizer = self._make_vocabulary(worker, last)
            size = sum(
                ByteTally.from_json(summary["tally"]).sum_measure("text_bytes", "read") for (summary, *_) in done
            )
            common_fields = {"tokenizer": tokenizer["key"], "size_bytes": size}
            tasks = ({"act": "encode", "input": key, **common_fields} for key in last)
            encoded = list(report_results("encode", engine.perform_tasks(tasks), pieces, self.options.progress))
        ending = DatasetFinisher(
            recipe=self.recipe,
            store=worker.work_store,
            directory=self.directory,
            inputs=self._inputs_digest(pieces, [summaries[0]["files"] for summaries in done]),
            pieces=[(piece.source, summaries) for piece, summaries in zip(pieces, done, strict=True)],
            encoded=encoded,
            tokenizer=tokenizer,
            unseen={*self.recipe.quarantine.release, *self.recipe.quarantine.drop},
        )
        self.options.progress.begin_phase("write", 1, 0)
        try:
            _, report = ending.write_dataset()
        except OSError as exc:
            raise not_written(self.directory, exc) from exc
        shutil.rmtree(home, ignore_errors=True)
        return BuildResult(self.directory, self._dataset_digest(), report)

    def _make_vocabulary(self, worker: BuildWorker, last: list[str]) -> Summary:
        """Train the tokenizer, or load it; return its key and its entry in the manifest."""
        config, output = self.recipe.tokenizer, self.recipe.output
        decided_by: dict[str, Any] = {
            "act": "vocabulary",
            "config": config.model_dump(mode="json"),
            "versions": tool_versions(),
            "code": code_digest(),
        }
        if not isinstance(config, Training):
            content = _load_vocabulary(config).to_json()
            decided_by["content"] = hashlib.sha256(content).hexdigest()
        else:
            decided_by |= {"texts": last, "seed": output.seed, "validation_share": output.validation_share}
        key = work_key(decided_by)
        self.options.progress.begin_phase("vocabulary", 1, 0)

        def work(directory: Path) -> Summary:
            trained = self._obtain_tokenizer(worker.work_store, last)
            content = trained.to_json()
            (directory / TOKENIZER).write_bytes(content)
            (directory / EOS).write_text(trained.backend.id_to_token(trained.eos_id) or "", encoding="utf-8")
            return {
                "kind": config.kind,
                "vocab_size": trained.vocab_size,
                "eos_id": trained.eos_id,
                "digest": hashlib.sha256(content).hexdigest(),
            }

        return {"key": key, **(worker.work_store.find_summary(key) or worker.work_store.store_work(key, work))}

    def _obtain_tokenizer(self, store: WorkStore, last: list[str]) -> TextTokenizer:
        config = self.recipe.tokenizer
        if not isinstance(config, Training):
            return _load_vocabulary(config)
        documents = (
            decode_document(record) for key in last for record in RecordFile(store.work_directory(key) / DOCUMENTS)
        )
        return train_tokenizer(training_texts(documents, self.recipe.output), config)

    def _piece_digests(self, worker: BuildWorker, pieces: Sequence[SourcePiece]) -> list[FileDigests]:
        return [
            piece.file_digests(PieceReader(worker.open_recipe_source(piece.source), piece).digest_files())
            for piece in pieces
        ]

    def _inputs_digest(self, pieces: Sequence[SourcePiece], digests: Sequence[FileDigests]) -> str:
        """Return the digest of everything that decides the dataset, however its files were put together."""
        files = [
            [piece.source, name, digest]
            for piece, file_digests in zip(pieces, digests, strict=True)
            for name, digest in file_digests
        ]
        settings = self.recipe.model_dump(mode="json", exclude={"output": {"signer"}})
        steps = [step_settings(step) for step in self.recipe.steps]
        return hashlib.sha256(canonical_json([settings, steps, tool_versions(), files])).hexdigest()

    def _existing_result(self, inputs: str, home: Path) -> BuildResult:
        report = read_report(self.directory)
        if report["inputs"] != inputs:
            raise InputError(
                f"{self.directory}: has a dataset of another recipe, other files or other versions; give another "
                "directory with --out, or remove it; phalanx data diff compares two"
            ).with_facts(file=str(self.directory), do="give another directory with --out")
        shutil.rmtree(home, ignore_errors=True)
        return BuildResult(self.directory, self._dataset_digest(), report, already_existed=True)

    def _dataset_digest(self) -> str:
        key = self.recipe.output.key
        return open_dataset(self.directory, key=None if key is None else SealKey.from_file(key)).digest


def _load_vocabulary(config: FileTokenizerConfig | ModelVocabulary) -> TextTokenizer:
    if isinstance(config, ModelVocabulary):
        return load_tokenizer(ModelTokenizerConfig(eos_token=config.eos_token), config.path)
    return load_tokenizer(config, None)


@contextlib.contextmanager
def _lock_directory(home: Path) -> Iterator[None]:
    """Keep other builds out of a directory; a process that is killed lets go of it."""
    with contextlib.ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context((home / ".alone").open("wb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError) as exc:
            # not found: the other one has just tidied up
            raise InputError(
                f"{home.parent}: another build uses it; wait for its end, or give another directory with --out"
            ).with_facts(file=str(home.parent), do="wait, or give another directory with --out") from exc
        except OSError as exc:
            raise DataError(f"{home}: cannot be written ({exc.strerror}); choose another place with --out") from exc
        yield
