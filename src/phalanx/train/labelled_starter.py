"""The part of a starter for labelled texts of one's own: a file or a folder for each client becomes its section."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.sources.files import SourceFile, read_text
from phalanx.data.sources.listing import list_files
from phalanx.data.tasks import Columns, read_examples
from phalanx.data.tasks.own import guess_columns
from phalanx.errors import DataError

_ENDINGS = (".csv", ".tsv", ".jsonl")
_HELD_OUT = 5
"""Of so many texts of a class one is held out."""


@dataclass(frozen=True)
class StarterTexts:
    """Labelled texts of all clients."""

    columns: Columns
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    num_rows: int

    def toml_section(self) -> str:
        """Return the section of a run file."""
        lines = {
            "classes": list(self.columns.classes),
            "text": self.columns.text,
            "label": self.columns.label,
            "train": [str(path) for path in self.train],
            "test": [str(path) for path in self.test],
        }
        entries = "\n".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in lines.items())
        return f"[data.labelled.task]             # a file of each client, in the order of their turns\n{entries}\n"


def own_texts(places: Sequence[Path], spare: Path) -> StarterTexts:
    """Find the labelled texts of each client; one file is divided into texts to learn from and to measure by.

    Args:
        places: One for each client: a folder with ``train`` and ``test`` as CSV, TSV or JSON lines, a folder with a
            folder of ``.txt`` files for each class, or one file.
        spare: Folder for files that are made of others.
    """
    pairs = [_pair_of(place) for place in places]
    whole_files = [_as_file(place, spare) for place, pair in zip(places, pairs, strict=True) if pair is None]
    files = [path for pair in pairs if pair is not None for path in pair] + whole_files
    columns, num_rows = guess_columns(files)
    files_to_divide = iter(whole_files)
    divided = [_divide_texts(next(files_to_divide), columns, spare) if pair is None else pair for pair in pairs]
    return StarterTexts(columns, tuple(train for train, _ in divided), tuple(test for _, test in divided), num_rows)


def _pair_of(place: Path) -> tuple[Path, Path] | None:
    """The two files of a folder; None where it is a file, or has none of these names."""
    if not place.is_dir():
        return None
    files = list_files(place, ("",))
    paths_by_split = {
        name: [Path(file.path) for file in files if file.name.removesuffix(".gz") in _split_names(name)]
        for name in ("train", "test")
    }
    return (paths_by_split["train"][0], paths_by_split["test"][0]) if all(paths_by_split.values()) else None


def _split_names(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem}{ending}" for ending in _ENDINGS)


def _as_file(place: Path, spare: Path) -> Path:
    """Return the one file of a client; of a folder of classes, one that is made of it."""
    if place.is_file():
        return place
    files = [file for file in list_files(place, (".txt",)) if _is_of_class(file)]
    texts = [(file.name.partition("/")[0], Path(file.path)) for file in files]
    if not texts:
        raise DataError(
            f"{place}: no labelled texts found; expected a file that ends in {', '.join(_ENDINGS)}, a folder with "
            "train and test of these, or a folder with a folder of .txt files for each class"
        )
    rows = [{"text": read_text(path), "label": label} for label, path in texts]
    return _write_rows(spare / f"{place.resolve().name}.jsonl", rows)


def _is_of_class(file: SourceFile) -> bool:
    return file.name.count("/") == 1 and file.name.endswith(".txt")


def _divide_texts(path: Path, columns: Columns, spare: Path) -> tuple[Path, Path]:
    """Hold one of five texts of each class out; a text that is there twice stays with the first."""
    texts = {labelled_row.example.text: labelled_row.example.label for labelled_row in read_examples(path, columns)}
    held_out: set[str] = set()
    for label in range(len(columns.classes)):
        texts_of_class = sorted((text for text, text_label in texts.items() if text_label == label), key=_draw_key)
        held_out |= set(texts_of_class[: len(texts_of_class) // _HELD_OUT])
    if not held_out:
        raise DataError(f"{path}: every class has fewer than {_HELD_OUT} texts, so none can be held out; give more")
    stem = path.name.partition(".")[0]
    rows = {
        name: [
            {columns.text: text, columns.label: columns.classes[label]}
            for text, label in texts.items()
            if (text in held_out) == (name == "test")
        ]
        for name in ("train", "test")
    }
    return _write_rows(spare / f"{stem}.train.jsonl", rows["train"]), _write_rows(
        spare / f"{stem}.test.jsonl", rows["test"]
    )


def _draw_key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    if path.exists():
        raise DataError(f"{path}: already exists; move it, or use it: give a folder with train and test")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    path.chmod(0o600)
    return path
