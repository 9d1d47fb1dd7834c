"""A run's checkpoint, verified, as a model directory in the hub's layout."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint import Checkpoint
from phalanx.checkpoint.export import RunTokenizer, export_model, name_weights, read_trained, write_companions
from phalanx.checkpoint.export_adapter import peft_files
from phalanx.checkpoint.exported import ADAPTER_WEIGHTS, compare_companions, read_tensors, verify_export
from phalanx.checkpoint.kept_model import check_kept, open_kept
from phalanx.data import prepare_corpus
from phalanx.data.tasks import TASKS
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import ModelSource, open_model, weights_digest
from phalanx.models.classifier import ClassifierForm, find_classifier_form
from phalanx.models.directory import WEIGHTS
from phalanx.objectives.pretraining import mask_token_of
from phalanx.train.config import RunConfig, SplitRun
from phalanx.train.records.past_run import PastRun
from phalanx.train.records.run_directory import ADAPTERS, cache_beside
from phalanx.train.setup.preflight import load_past_code


def export_run(
    past: PastRun,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    merge: bool = False,
    own_code: bool = False,
) -> int:
    """Write the model, or the adapter, of a verified checkpoint so that transformers and peft load it.

    Neither the text of the run is needed, nor the model that it began with, but for an adapter's own.

    Args:
        step: Checkpoint to export; None takes the newest.
        best: Take the one with the best validation.
        merge: Add an adapter to the model's own weights.
        own_code: Code of the user's own that the run directory keeps may be run.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged, or the run directory's copy of the model was
            altered, or `out` exists, or an enclave has let nothing out.
    """
    config = load_past_code(past.config, past.path, allowed=own_code)
    if isinstance(config, SplitRun) and (step is not None or best):
        raise ConfigError(f"{past.path}: a split's checkpoints are sealed; leave --step and --best out")
    checkpoint = past.open_verified(step, best=best)
    with _open_model(config, past, checkpoint) as (source, of_run):
        export_model(
            checkpoint,
            source,
            out,
            adapter=config.model.adapter,
            merge=merge,
            tokenizer=_with_mask(of_run, config),
            released=_read_released(past),
            classifier=_find_classifier(config, source),
        )
    return checkpoint.step


def verify_run_export(past: PastRun, directory: Path) -> str:
    """Compare a directory that `export_run` wrote with the end of its run; return the digest that the run signed.

    Raises:
        CheckpointError: The run has not ended, or the directory holds other tensors than the run trained.
        VerificationError: The weights, or config, tokenizer or chat template beside them, are not those of the run's
            end.
    """
    adapter = past.config.model.adapter
    if past.final_weights_digest is None:
        return verify_export(directory, None, None)
    checkpoint = past.open_verified()
    with (
        _open_model(past.config, past, checkpoint) as (source, tokenizer),
        tempfile.TemporaryDirectory(prefix="phalanx-companions-") as scratch,
    ):
        config, tensors, file = None, None, ADAPTER_WEIGHTS
        classifier = _find_classifier(past.config, source)
        if adapter is not None:
            released = _read_released(past)
            trained = released or read_trained(checkpoint)
            config, tensors = peft_files(trained, source, adapter, classifier, is_part=released is not None)
        elif classifier is not None:
            tensors, file = name_weights(read_trained(checkpoint), source, classifier), WEIGHTS
        digest = verify_export(directory, past.final_weights_digest, tensors, file)
        write_companions(Path(scratch), source, _with_mask(tokenizer, past.config), config, classifier)
        compare_companions(directory, Path(scratch))
    return digest


def _with_mask(tokenizer: RunTokenizer, config: RunConfig) -> RunTokenizer:
    return replace(tokenizer, mask_token=mask_token_of(config.train.objective))


def _read_released(past: PastRun) -> Mapping[str, Tensor] | None:
    """Read what the enclave of a split has let out, since its checkpoints are sealed; None of any other run."""
    if not isinstance(past.config, SplitRun):
        return None
    path = past.path / ADAPTERS
    if past.final_weights_digest is None or not path.is_file():
        raise CheckpointError(
            f"{path}: missing: adapters leave the enclave at the end of a run with [split.release], if that permits; "
            "events.jsonl says why they did not"
        )
    if past.released_digest is None:
        raise CheckpointError(
            f"{path}: the run's log, which an earlier version wrote, has no digest to compare it with"
        )
    released = dict(read_tensors(path))
    digest = weights_digest(released.items())
    if digest != past.released_digest:
        raise CheckpointError(
            f"{path}: has digest {digest:.16}..., but the run's log says {past.released_digest:.16}... of what left "
            "the enclave; restore the file"
        )
    return released


def _find_classifier(config: RunConfig, source: ModelSource) -> ClassifierForm | None:
    """Find the form of a model that classifies texts; None of a language model."""
    labelled = config.data.labelled
    if labelled is None:
        return None
    own = labelled.own_task
    classes = TASKS[labelled.task_name].load(labelled.home).classes if own is None else own.classes
    return find_classifier_form(source, tuple(classes), config.data.sequence_length)


@contextlib.contextmanager
def _open_model(config: RunConfig, past: PastRun, checkpoint: Checkpoint) -> Iterator[tuple[ModelSource, RunTokenizer]]:
    """Open the model, with its weights where an adapter belongs to them, and the tokenizer of the run."""
    cache, seed = cache_beside(past.path), config.train.seed
    is_kept = check_kept(past.path, checkpoint.state)
    with contextlib.ExitStack() as stack:
        kept_model = stack.enter_context(open_kept(past.path, past.key_holder(), past.run_id)) if is_kept else None
        if kept_model is not None and config.model.adapter is None:
            yield kept_model
            return
        source = open_model(config.model, cache / "models", seed)
        if config.model.adapter is not None:
            checkpoint.check_base(source.files_digest())
        if kept_model is not None:
            yield source, kept_model[1]
            return
        # a run of before this version
        corpus = prepare_corpus(config.data, cache / "data", seed, source.tokenizer_path)
        yield source, RunTokenizer.from_config(config.data.tokenizer, source, corpus)
