"""The parts of a classification task; loads no torch."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import DataError


@dataclass(frozen=True)
class Example:
    """One text with its class.

    Attributes:
        silo: Its collector, where a task has natural silos; else empty.
    """

    text: str
    label: int
    silo: str = ""


@dataclass(frozen=True)
class LabelledExamples:
    """The examples of a task as they were loaded.

    Attributes:
        classes: Names of the classes; a label is an index of them.
        contradictory: Texts that were left out because they came with two different labels.
    """

    classes: tuple[str, ...]
    examples: tuple[Example, ...]
    contradictory: int = 0

    @property
    def has_silos(self) -> bool:
        """Whether every example names its collector."""
        return all(example.silo for example in self.examples)

    @property
    def examples_digest(self) -> str:
        """SHA-256 in hex over classes and examples in their order."""
        total = hashlib.sha256("\0".join(self.classes).encode())
        for example in self.examples:
            total.update(f"\n{example.label}\0{example.silo}\0{example.text}".encode("utf-8", "surrogatepass"))
        return total.hexdigest()


@dataclass(frozen=True)
class TaskCard:
    """A task as it stands in the table.

    Attributes:
        source: Origin, and the authors to name.
        licence: Licence of the data, as its publisher states it.
        load: Reads it. Its argument is the folder of data files; None means the usual places (`find_file`).
    """

    name: str
    question: str
    source: str
    licence: str
    load: Callable[[Path | None], LabelledExamples]


def unique_examples(classes: Sequence[str], examples: Iterable[Example], where: str) -> LabelledExamples:
    """Keep each text once, and none that comes with two labels.

    Args:
        classes: Names; at least two, each with an example.
        examples: In the order of the source; white space around a text does not count.
    """
    seen: dict[str, Example] = {}
    labels: dict[str, set[int]] = {}
    for example in examples:
        text = " ".join(example.text.split())
        if not text or not 0 <= example.label < len(classes):
            raise DataError(f"{where}: an example with label {example.label} and {len(text)} characters; get it again")
        seen.setdefault(text, Example(text, example.label, example.silo))
        labels.setdefault(text, set()).add(example.label)
    unambiguous = tuple(example for text, example in seen.items() if len(labels[text]) == 1)
    counts = Counter(example.label for example in unambiguous)
    missing = [name for label, name in enumerate(classes) if not counts[label]]
    if missing or len(classes) < 2:
        raise DataError(f"{where}: no example of class {', '.join(missing) or '(fewer than two)'}; get it again")
    return LabelledExamples(tuple(classes), unambiguous, len(seen) - len(unambiguous))


DATA_VARIABLE = "PHALANX_DATA"
USUAL_FOLDERS = (Path("data"), Path("..") / "shared" / "data")


def find_file(home: Path | None, name: str, where_from: str) -> Path:
    """Find a data file; nothing is ever fetched from a network.

    Args:
        home: The folder that must hold it; None looks into `PHALANX_DATA`, then into `USUAL_FOLDERS`.
    """
    folders = _data_folders() if home is None else (home,)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = ", ".join(str(folder) for folder in folders)
    raise DataError(
        f"{name}: not found in {looked}; {where_from}, and save it there, or set {DATA_VARIABLE} to its directory"
    )


def _data_folders() -> tuple[Path, ...]:
    named = os.environ.get(DATA_VARIABLE)
    return (Path(named),) if named else USUAL_FOLDERS
