"""A look at everything that a run reads and at the extras that it needs, before torch is imported or a file written."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.config import KEPT_CODE, open_own_code, own_references
from phalanx.config.extras import require_bitsandbytes, require_tenseal
from phalanx.data import BpeConfig, DataConfig, FileTokenizerConfig, ModelTokenizerConfig
from phalanx.data.phases import DatasetTokenizerConfig
from phalanx.data.row_layout import chats_read_as_text
from phalanx.data.run_dataset import open_groups
from phalanx.data.sources import SourceSettings, links_out_of, no_text, open_source
from phalanx.data.spool import Intake
from phalanx.data.tasks import Columns, load_own
from phalanx.data.tokenizers import load_tokenizer, train_bpe
from phalanx.data.tokenizers.tokenizer import named_tokenizer
from phalanx.engine import check_build
from phalanx.errors import ConfigError, DataError
from phalanx.models import ModelConfig
from phalanx.models.directory import check_model, describe_model
from phalanx.models.layout import check_length, check_stages, check_vocabulary
from phalanx.objectives import objective_of
from phalanx.planner.model.optimizers import OPTIMIZERS
from phalanx.telemetry.sinks import check_sinks
from phalanx.train.config import FederatedPipelineRun, FederatedRun, PipelineRun, RankedRun, RunConfig, SplitRun
from phalanx.train.runs.mixed import FurtherData, MixedBase

_POSITIONS, _LAYERS = ("max_position_embeddings", "n_positions"), ("num_hidden_layers", "n_layer")
_EMBEDDINGS = ("vocab_size",)
"""What families call them in config.json."""
_FIRST_DOCUMENTS = 20
_MAX_BYTES = 1 << 24
"""Of a file that is read whole for its first document."""
_SMALL_BYTES = 1 << 16
"""Of all sources together, from which a vocabulary is trained in far less time than torch takes to import."""


def check_inputs(run: RunConfig) -> None:
    """Refuse a run whose model or data contradict its file: files, fields and first documents are read.

    Raises:
        ConfigError: This build of torch has no such device, code of the user's own cannot be loaded, or stages or
            sequences are more than the model has.
        DataError: A source is missing, empty or malformed where it begins, a tokenizer's file is missing, or a file of
            labelled texts of one's own is wrong anywhere.
    """
    check_build(run.train.device, "train.device")
    load_own_code(run)
    check_model(run.model, needs_tokenizer=isinstance(run.data.tokenizer, ModelTokenizerConfig))
    _check_sizes(run)
    _check_tokenizer(run)
    _check_data(run.data)
    for where, data in _all_data(run)[1:]:
        _check_sources(data.sources, f"{where}.sources")
    _check_small_text(run)
    _check_held_out(run)


def text_warnings(run: RunConfig) -> list[str]:
    """Return a warning for each source of a run that reads conversations as text, or text beside its folder."""
    warnings = chats_read_as_text(run.data.sources, "data.sources") + links_out_of(run.data.sources, "data.sources")
    for where, data in _all_data(run):
        for key in ("conversations", "preferences"):
            section = getattr(data, key)
            warnings += links_out_of(section.sources if section else (), f"{where}.{key}.sources")
    for where, data in _all_data(run)[1:]:
        warnings += chats_read_as_text(data.sources, f"{where}.sources") + links_out_of(
            data.sources, f"{where}.sources"
        )
    for one in run.data.validation:
        warnings += chats_read_as_text(one.sources, f'data.validation "{one.name}"')
    return warnings


def _all_data(run: RunConfig) -> list[tuple[str, DataConfig | FurtherData]]:
    """Return ``[data]`` and that of each of ``[[objectives]]``, with their names in the run file."""
    further = run.objectives if isinstance(run, MixedBase) else ()
    return [("data", run.data), *((f"objectives.{number}.data", one.data) for number, one in enumerate(further))]


def _check_sizes(run: RunConfig) -> None:
    """Compare a run of stages with config.json; keys that it lacks are checked with the model."""
    described = describe_model(run.model)
    if described is None or isinstance(run, RankedRun):
        return
    longest, layers = (_first_number(described, names) for names in (_POSITIONS, _LAYERS))
    check_length(run.data.sequence_length, longest)
    if layers is not None and isinstance(run, PipelineRun | FederatedPipelineRun):
        check_stages(run.pipeline.stages, layers)


def _check_tokenizer(run: RunConfig) -> None:
    """Read a tokenizer's file; compare its number of tokens, or a new tokenizer's, with the embeddings."""
    tokenizer, described = run.data.tokenizer, describe_model(run.model)
    if run.data.dataset is not None:
        if not isinstance(run.data.dataset.path, Path):
            # in an object store: brought here, and compared with the model, before the first step
            return
        # one of a model is only known with the model, and compared before the first step
        named = named_tokenizer(tokenizer, None) if isinstance(tokenizer, FileTokenizerConfig) else None
        groups, _ = open_groups(run.data, run.data.dataset, run.data.dataset.path, named)
        num_tokens = groups.manifest.tokenizer.vocab_size
    elif isinstance(tokenizer, ModelTokenizerConfig | DatasetTokenizerConfig):
        return
    elif isinstance(tokenizer, FileTokenizerConfig):
        if not tokenizer.path.is_file():
            raise DataError(
                f"data.tokenizer.path: {tokenizer.path}: not a file; give the path of a tokenizer.json"
            ).with_facts(
                code="PHX-I016",
                file=str(tokenizer.path),
                key="data.tokenizer.path",
                found="no file",
                expected="a tokenizer.json",
                do="give the path of a tokenizer.json",
            )
        num_tokens = load_tokenizer(tokenizer, None).vocab_size
    else:
        num_tokens = tokenizer.vocab_size
    embedded = None if described is None else _first_number(described, _EMBEDDINGS)
    if embedded is not None:
        check_vocabulary(num_tokens, embedded)


def _first_number(described: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((described[name] for name in names if type(described.get(name)) is int), None)


def _check_small_text(run: RunConfig) -> None:
    """Train the vocabulary of a small text for nothing: it may be too large for it, which only its training shows."""
    data = run.data
    elsewhere = data.dataset or data.conversations
    if (
        elsewhere is not None
        or isinstance(run, SplitRun | FederatedRun)
        or not isinstance(data.tokenizer, BpeConfig)
        or not _is_small(data.sources)
    ):
        return
    intake = Intake(run.train.seed, data.validation_share, data.max_documents)
    with TemporaryDirectory(prefix="phalanx-") as spare:
        sources = [(source.kind, open_source(source)) for source in data.sources]
        spool = intake.spool_sources(sources, Path(spare), lambda _phase, _documents: None)
        if spool.train.documents:
            train_bpe(spool.train.kept_texts(), data.tokenizer)


def _check_held_out(run: RunConfig) -> None:
    """Refuse a run that has nothing to measure itself with; sites of a federated run hold out rows of their own."""
    data = run.data
    if data.validation_names or isinstance(run, FederatedRun):
        return
    do = "set data.validation_share above 0"
    if data.preferences is None and not data.prompts:
        do += ", or name a set in data.validation"
    raise ConfigError(f"data.validation_share: found 0, but a run needs held-out text; {do}").with_facts(
        key="data.validation_share", found="0", expected="above 0", do=do
    )


def _is_small(sources: Sequence[SourceSettings]) -> bool:
    """Whether all of it is plain text or JSON lines of this machine, and little of it."""
    bytes_left, named = _SMALL_BYTES, [getattr(source, "path", None) for source in sources]
    paths = [path for path in named if isinstance(path, Path)]
    if len(paths) < len(named) or {source.kind for source in sources} - {"text", "jsonl"}:
        return False
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else (path,):
            bytes_left -= file.lstat().st_size
            if bytes_left < 0:
                return False
    return bool(paths)


def load_own_code(run: RunConfig) -> None:
    """Load the user's own code of a run file, attacks apart, and check objective and metrics sinks."""
    for kind in own_references(run.model_dump(mode="json", exclude={"attack"})):
        open_own_code(kind, run.home)
    objective_of(run.train.objective)
    _check_own_family(run.model)
    check_sinks(run.tracking)


def load_past_code(run: RunConfig, run_dir: Path, *, allowed: bool) -> RunConfig:
    """Return a past run, with its user's own code loaded where this was asked for: it may be another user's."""
    if run.own_code and not allowed:
        raise ConfigError(
            f"{run_dir}: the run has its own code ({', '.join(run.own_code)}); read it in {run_dir / KEPT_CODE}, "
            "then add --own-code"
        )
    load_own_code(run)
    return run


def _check_own_family(model: ModelConfig) -> None:
    if model.family is None:
        return
    from phalanx.models import adopt_family  # noqa: PLC0415 - it loads torch, and few runs have one

    family, described = adopt_family(model.family), describe_model(model) or {}
    if described.get("model_type") != family.model_type:
        raise ConfigError(
            f"model.family supports model_type {family.model_type!r}, but the model has "
            f"{described.get('model_type')!r}; use a model of that type, or remove it"
        )


def _check_data(data: DataConfig) -> None:
    own_files = None if data.labelled is None else data.labelled.own_task
    if own_files is not None:
        for train, test in zip(own_files.train, own_files.test, strict=True):
            load_own(train, test, Columns(own_files.text, own_files.label, own_files.classes))
    _check_sources(data.sources, "data.sources")
    for validation_set in data.validation:
        _check_sources(validation_set.sources, f'data.validation "{validation_set.name}"')


def _check_sources(sources: Sequence[SourceSettings], where: str) -> None:
    for number, source in enumerate(sources):
        try:
            _check_source(source)
        except DataError as exc:
            raise DataError(f"{where}.{number}: {exc}").with_facts(
                **{**exc.error_facts, "key": f"{where}.{number}"}
            ) from exc


def _check_source(source: SourceSettings) -> None:
    opened = open_source(source)
    path = getattr(source, "path", None)
    by_line = source.kind == "jsonl"
    if not by_line and path is not None and path.is_file() and path.stat().st_size > _MAX_BYTES:
        return
    has_text: list[bool] = []
    for document in islice(opened.documents(), _FIRST_DOCUMENTS):
        has_text.append(bool(document.text.strip()))
        if has_text[-1] and not by_line:
            return
    if not any(has_text) and len(has_text) < _FIRST_DOCUMENTS:
        raise no_text(source)


def require_extras(run: RunConfig) -> None:
    """Refuse a run that this machine lacks a package for."""
    if run.model.base_quantization is not None:
        require_bitsandbytes(f'model.adapter.quantize = "{run.model.base_quantization}"')
    if OPTIMIZERS[run.optimizer.kind].in_bytes:
        require_bitsandbytes(f'optimizer.kind = "{run.optimizer.kind}"')
    if isinstance(run, FederatedRun) and run.federated.sums == "homomorphic":
        require_tenseal('federated.sums = "homomorphic"')
