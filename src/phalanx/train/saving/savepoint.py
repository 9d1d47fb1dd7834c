"""The savepoint of a run: a checkpoint's state beside the tensors, written and read in one place."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint import (
    BestCheckpoint,
    Checkpoint,
    KeyHolder,
    RemoteStore,
    Retention,
    Shard,
    WrittenPieces,
    drop_checkpoints_after,
    latest_checkpoint,
    list_checkpoints,
    manifest_digest,
    open_checkpoint,
    open_key,
    save_checkpoint,
    step_directory,
    step_of,
)
from phalanx.checkpoint.export import RunTokenizer
from phalanx.checkpoint.kept_model import KEPT_MODEL, check_kept, keep_model, kept_files
from phalanx.config import digest_config
from phalanx.errors import AuditLogError, CheckpointError, DiskError
from phalanx.models import ModelSource
from phalanx.security.audit import AuditLog, LogHead
from phalanx.telemetry import MetricsFile
from phalanx.train.config import RunConfig
from phalanx.train.loop import Loader
from phalanx.train.records.history import RunHistory
from phalanx.train.records.record import RunningTotals
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.records.summary import Figures


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint that was written.

    Attributes:
        kept: Steps of all checkpoints that are on this disk now.
        write_s: Seconds of writing; of copying to a remote store as well, where there is one.
        remote_failure: Why it is not in the remote store; None where it is, or where there is none.
        best: The best one of the kept checkpoints; None where the run keeps none for that.
    """

    step: int
    manifest: str
    kept: tuple[int, ...]
    write_s: float
    remote_failure: str | None = None
    best: BestCheckpoint | None = None

    def event_body(self) -> dict[str, Any]:
        """The body of the event `checkpoint_saved`."""
        best = {} if self.best is None else {"best": self.best.to_json()}
        return {"step": self.step, "manifest": self.manifest, "kept": list(self.kept), "write_s": self.write_s, **best}


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, which a checkpoint holds beside the tensors: where its data stands, and its counts."""

    loader: Loader
    figures: Figures
    totals: RunningTotals

    def progress_state(self) -> dict[str, Any]:
        """What a later session goes on from."""
        return {
            "loader": self.loader.position_state(),
            "figures": self.figures.to_json(),
            "totals": self.totals.to_json(is_private=self.figures.budget is not None),
        }

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier session had."""
        self.loader.load_position(state["loader"])
        self.figures.load_json(state["figures"])
        self.totals.load_json(state["totals"])


@dataclass(frozen=True)
class ModelOrigin:
    """The files that a checkpoint's tensors make sense with.

    Attributes:
        source: The model; its files are part of what an adapter's checkpoint needs.
        vocabulary: Digest of the vocabulary that text is encoded with; None where this process has no text.
    """

    source: ModelSource
    vocabulary: str | None = None


class Savepoint:
    """A savepoint moves the state of a run between memory and the run directory's checkpoints.

    Args:
        history: The audit log's entries on checkpoints, and on run files of earlier sessions.
        log: The audit log; every manifest has its head; None where there is none.
    """

    def __init__(
        self,
        run: RunConfig,
        home: RunDirectory,
        progress: RunProgress,
        origin: ModelOrigin,
        history: RunHistory,
        log: AuditLog | None = None,
    ) -> None:
        self._run = run
        self._config_digest = digest_config(run)
        self._configs = {self._config_digest, *history.configs}
        self._home = home
        self._progress = progress
        self._certified = history.certified
        self._log = log
        settings = run.checkpoint
        self._key: KeyHolder | None = None if settings.key is None else open_key(settings.key)
        self._remote = None if settings.remote is None else RemoteStore(settings.remote, home.run_id)
        # an adapter's checkpoint holds no frozen weight: it says which ones belong to it
        self._base = None if run.model.adapter is None else origin.source.files_digest()
        self._vocabulary = origin.vocabulary
        self._kept: dict[str, str] | None = None

    def keep_model_files(self, source: ModelSource, tokenizer: RunTokenizer) -> None:
        """Keep config and tokenizer in the run directory, encrypted like checkpoints, which sign their digests."""
        seal = None if self._key is None else (self._key, self._home.run_id)
        keep_model(self._home.path, source, tokenizer, seal)
        self._kept = kept_files(self._home.path)

    @property
    def directory(self) -> Path:
        """The directory of the run's checkpoints."""
        return self._home.checkpoint_directory

    def saved_state(self, num_steps: int) -> dict[str, Any]:
        """Everything beside the tensors, as it is now."""
        state = {
            "run": self._home.run_id,
            "config_digest": self._config_digest,
            "step": num_steps,
            **self._progress.progress_state(),
        }
        belongs = {"base": self._base, "vocabulary": self._vocabulary, "kept": self._kept}
        return state | {name: value for name, value in belongs.items() if value is not None}

    def write_checkpoint(
        self, num_steps: int, shards: Iterable[Shard] | WrittenPieces, state: dict[str, Any], *, alone: bool = False
    ) -> SavedCheckpoint:
        """Write a checkpoint and copy it to the remote store; `alone` removes all older ones. Any thread may.

        Raises:
            CheckpointError: It cannot be written; earlier ones are untouched.
        """
        started, better = time.perf_counter(), self.improved_best(num_steps)
        path = save_checkpoint(
            self._home.checkpoint_directory,
            num_steps,
            shards,
            state,
            sign=self._home.owner,
            retention=self._retention_rule(alone=alone),
            key=self._key,
            log_head=self._durable_log_head(),
        )
        manifest, kept_steps = manifest_digest(path), tuple(sorted(list_checkpoints(self._home.checkpoint_directory)))
        failure = self._copy_out(path, kept_steps)
        best = self._best_checkpoint if better is None else better
        return SavedCheckpoint(num_steps, manifest, kept_steps, time.perf_counter() - started, failure, best)

    def improved_best(self, num_steps: int) -> BestCheckpoint | None:
        """Return the measure by which this step's checkpoint would be the best; None where it would not, or none is."""
        candidate, best = self._progress.figures.candidate, self._best_checkpoint
        if candidate is None or candidate.step != num_steps or not math.isfinite(candidate.loss):
            return None
        return candidate if best is None or candidate.loss < best.loss else None

    @property
    def _best_checkpoint(self) -> BestCheckpoint | None:
        """The best one so far by the set that the run file names; one by another set is kept no longer."""
        best = self._certified.best
        return best if best is not None and best.on == self._run.checkpoint.best else None

    def _retention_rule(self, *, alone: bool) -> Retention:
        # what a rollback undoes was dropped from the best one already: see `CertifiedCheckpoints`
        best, settings = self._best_checkpoint, self._run.checkpoint
        best_step = None if best is None else best.step
        return Retention(1, 0, best_step) if alone else Retention(settings.keep, settings.keep_every, best_step)

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of later steps: they contain undone ones."""
        drop_checkpoints_after(self._home.checkpoint_directory, step)

    def open_newest(self) -> Checkpoint | None:
        """Open and verify the newest checkpoint; None when none was written yet.

        Where this disk has lost checkpoints that the audit log knows of, the remote store is asked for them.

        Raises:
            CheckpointError: It is damaged, foreign, of another config, older than the audit log knows, or newer than
                the audit log that is there.
        """
        directory, newest = self._home.checkpoint_directory, self._certified.newest_step
        path = latest_checkpoint(directory)
        if newest is not None and self._remote is not None and (path is None or (step_of(path.name) or 0) < newest):
            path = self._remote.fetch_checkpoint(newest, directory, self._home.owner.public)
        step = None if path is None else step_of(path.name)
        self._certified.check_newest(step, None if path is None else manifest_digest(path), str(directory))
        return None if path is None else self._open_verified(path)

    def accept_older(self, step: int) -> None:
        """Make an older checkpoint the newest one: it is verified, then later ones are removed."""
        path = self._home.checkpoint_directory / step_directory(step)
        if not path.is_dir():
            present = sorted(list_checkpoints(self._home.checkpoint_directory))
            raise CheckpointError(f"{path}: missing; existing checkpoints: steps {present}")
        self._open_verified(path)
        self.forget_after(step)

    def rewind_run(self, checkpoint: Checkpoint | None, metrics: MetricsFile) -> int:
        """Take loader, figures, totals and metrics back to a checkpoint, or to the beginning."""
        start = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            try:
                self._progress.load_progress(checkpoint.state)
            except (KeyError, TypeError, AttributeError) as exc:
                raise CheckpointError(f"{checkpoint.path}: its state lacks {exc}; use an older checkpoint") from exc
            totals = self._progress.totals
            if totals.steps != start or start > self._run.train.steps:
                raise CheckpointError(
                    f"{checkpoint.path}: is from step {start}, its totals count {totals.steps} steps, but the run "
                    f"has {self._run.train.steps}; use an older checkpoint"
                )
        metrics.truncate_after(start - 1)
        self._progress.totals.complete_from(metrics.path)
        return start

    def _open_verified(self, path: Path) -> Checkpoint:
        checkpoint = open_checkpoint(
            path,
            self._home.owner.public,
            run=self._home.run_id,
            config_digest=self._configs,
            key=self._key,
        )
        head = checkpoint.log_head
        if self._log is not None and head is not None and not self._log.contains_head(head):
            raise CheckpointError(
                f"{path}: was written when the audit log had {head.num_events} events, but the present log is "
                "another one; restore the log that belongs to it"
            )
        if self._base is not None:
            checkpoint.check_base(self._base)
        # fetch missing files of the model, beside its weights, from the remote store
        signed, kept_path = checkpoint.state.get("kept"), self._home.path / KEPT_MODEL
        if self._remote is not None and signed and not kept_path.exists():
            self._remote.fetch_kept(signed, kept_path, wrapped=self._key is not None)
        check_kept(self._home.path, checkpoint.state)
        if self._vocabulary is not None:
            checkpoint.check_vocabulary(self._vocabulary)
        return checkpoint

    def _durable_log_head(self) -> LogHead | None:
        """Where the audit log ends on the disk: a crash of the machine must not take lines that a checkpoint knows."""
        try:
            return None if self._log is None else self._log.sync_events()
        except (AuditLogError, DiskError) as exc:
            raise CheckpointError(str(exc)) from exc

    def _copy_out(self, path: Path, kept: Iterable[int]) -> str | None:
        if self._remote is None:
            return None
        try:
            # first: a checkpoint that is there is one that a run can go on from
            self._remote.upload_kept(self._home.path / KEPT_MODEL)
            self._remote.upload_checkpoint(path)
            self._remote.prune_steps(set(kept))
        except CheckpointError as exc:
            return str(exc)
        return None
