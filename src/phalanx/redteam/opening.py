"""The target that a path or an address means, with the training texts that belong to it."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.align.prompts import read_prompts, read_records
from phalanx.data import BatchLoader, Corpus, prepare_corpus
from phalanx.data.sources import CanarySettings
from phalanx.data.sources.files import decode_text, note_file_read
from phalanx.errors import DataError
from phalanx.redteam.asking import EndpointAsks, LocalAsks
from phalanx.redteam.target import Target, TextSet
from phalanx.serve.place import check_place, checkpoint_place, is_run
from phalanx.serve.text_model import TextModel
from phalanx.train import PastRun, export_run
from phalanx.train.records.run_directory import cache_beside

_MAX_FILE_BYTES = 1 << 28


@dataclass(frozen=True)
class TargetChoice:
    """What a person says of the target.

    Attributes:
        rows: Training rows of a run, and as many held-out ones.
        key_file: File with the server's access key.
    """

    where: str
    members: Path | None = None
    strangers: Path | None = None
    reference: Path | None = None
    prompts: Path | None = None
    canaries: CanarySettings | None = None
    rows: int = 64
    seed: int = 0
    model_name: str = "default"
    key_file: Path | None = None
    own_code: bool = False

    @property
    def is_address(self) -> bool:
        """Whether the target is a server."""
        return self.where.startswith(("http://", "https://"))


@contextlib.contextmanager
def open_target(choice: TargetChoice) -> Iterator[Target]:
    """Yield the target; a run's verified checkpoint is exported to a directory that is removed at the end.

    Raises:
        InputError: There is no such model, or a file cannot be read.
    """
    prompts = tuple(prompt.readable_text for prompt in read_prompts(choice.prompts)) if choice.prompts else ()
    if choice.is_address:
        asks = EndpointAsks(choice.where, choice.model_name, choice.key_file)
        yield Target(choice.where, asks=asks, prompts=prompts, seed=choice.seed)
        return
    with contextlib.ExitStack() as stack:
        directory, past = _find_directory(stack, choice)
        model = TextModel(directory)
        members, strangers, planted = TextSet(), TextSet(), choice.canaries
        if past is not None:
            members, strangers, canaries = _run_rows(past, model, choice)
            planted = planted or canaries
        length = model.context_length
        if choice.members is not None:
            members = _read_texts(choice.members, model, length)
        if choice.strangers is not None:
            strangers = _read_texts(choice.strangers, model, length)
        yield Target(
            name=choice.where,
            model=model,
            directory=directory,
            asks=LocalAsks(model) if model.has_template else None,
            members=members,
            strangers=strangers,
            reference=None if choice.reference is None else TextModel(choice.reference),
            canaries=planted,
            prompts=prompts,
            seed=choice.seed,
        )


def _find_directory(stack: contextlib.ExitStack, choice: TargetChoice) -> tuple[Path, PastRun | None]:
    path = Path(choice.where)
    place = checkpoint_place(path)
    run, step = (path, None) if place is None else place
    if not is_run(run):
        check_place(path)
        return path, None
    past = PastRun(run)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-redteam-"))) / "model"
    export_run(past, directory, step=step, merge=past.config.model.adapter is not None, own_code=choice.own_code)
    return directory, past


def _run_rows(past: PastRun, model: TextModel, choice: TargetChoice) -> tuple[TextSet, TextSet, CanarySettings | None]:
    """Return rows of the first steps, held-out rows, and planted canaries; nothing of a run whose text is elsewhere."""
    config = past.config
    nothing = TextSet(), TextSet(), None
    if config.data.labelled is not None or config.data.preferences is not None or config.data.prompts:
        return nothing
    try:
        corpus = prepare_corpus(config.data, cache_beside(past.path) / "data", config.train.seed, past.path / "model")
    except DataError:
        return nothing
    planted = next((source for source in config.data.sources if isinstance(source, CanarySettings)), corpus.canaries)
    count = min(choice.rows, corpus.num_train_sequences, corpus.num_validation_sequences)
    if not count:
        return TextSet(), TextSet(), planted
    drawn = list(dict.fromkeys(BatchLoader(corpus, count, config.train.seed).next_sequences()))
    return _token_rows(corpus, drawn, is_held_out=False), _token_rows(corpus, range(count), is_held_out=True), planted


def _token_rows(corpus: Corpus, numbers: "list[int] | range", *, is_held_out: bool) -> TextSet:
    batch = (corpus.validation_batch if is_held_out else corpus.train_batch)(list(numbers))
    rows = tuple(tuple(row) for row in batch.input_ids.tolist())
    kind = "held-out" if is_held_out else "training"
    return TextSet(rows, tuple(f"{kind} row {number}" for number in numbers), ("",) * len(rows))


def _read_texts(path: Path, model: TextModel, length: int) -> TextSet:
    """Read JSON lines with ``text``, perhaps ``name``, ``source``, ``attribute``; else each line of a file is a text.

    Raises:
        DataError: It cannot be read, or a line has no text.
    """
    if path.suffix == ".jsonl":
        records = read_records(path)
        stray = [place for place, record in records if not isinstance(record.get("text"), str)]
        if stray:
            raise DataError(f'{stray[0]}: has no "text"; expected one object a line with it').with_facts(file=str(path))
        texts = [record["text"] for _, record in records]
        names = [str(record.get("name", place)) for place, record in records]
        sources, attributes = ([str(record.get(key, "")) for _, record in records] for key in ("source", "attribute"))
        return TextSet.from_texts(model.tokenizer, texts, length, names, sources, attributes)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(f"{path}: has more than {_MAX_FILE_BYTES} bytes; give a sample of the texts")
        note_file_read(path)
        text = decode_text(path.read_bytes(), str(path))
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror})").with_facts(file=str(path)) from exc
    return TextSet.from_texts(model.tokenizer, [line for line in text.splitlines() if line.strip()], length)
