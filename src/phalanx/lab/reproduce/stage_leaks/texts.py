"""The texts: the owner's, the attackers' own, and kinds of text that an observer may want to tell apart."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from phalanx.data import PythonDocstringsConfig, PythonManualConfig
from phalanx.data.sources import Source, open_source
from phalanx.data.tasks import TASKS
from phalanx.errors import DataError
from phalanx.lab.bench.measure.clean_documents import paragraphs
from phalanx.lab.reproduce.leaks.texts import hashed_sequences, texts_of
from phalanx.lab.reproduce.stage_leaks.size import PipelineSize, Regime
from phalanx.lab.reproduce.texts import StandardLibraryCode, library_docstrings

_EACH = 16

TEXTS = {
    "owner": "docstrings of the standard library",
    "attackers": "docstrings of transformers; from scratch: further docstrings of the standard library",
    "domain": "the language reference, docstrings, or code of the standard library",
    "medical": "answers of MedQuAD, or paragraphs of WikiText-2",
}
PROPERTIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"domain": ("manual", "docstrings", "code"), "medical": ("answers", "encyclopedia")}
)
"""By name, the kinds of text that are told apart."""


@dataclass(frozen=True)
class LeakTexts:
    """Rows of one token more than a sequence, int64 ``[rows, length + 1]``.

    Attributes:
        owned: Text of the owner, which is trained on.
        held_out: More text of the owner, for the loss.
        known: Text that the attackers have themselves.
        labelled: By property, a tensor for each kind of text; a property without its data is left out.
    """

    owned: Tensor
    held_out: Tensor
    known: Tensor
    labelled: Mapping[str, tuple[Tensor, ...]]


def read_leak_texts(size: PipelineSize, regime: Regime, tokenizer: Path) -> LeakTexts:
    """Read all texts in a model's tokens."""
    row = size.length + 1
    own = size.owned + size.held_out
    from_owner = size.known if regime == "scratch" else 0
    docstrings = _read_kind("docstrings")
    rows = hashed_sequences(docstrings, tokenizer, own + from_owner, row, _EACH)
    known = rows[own:] if from_owner else hashed_sequences(_read_kind("library"), tokenizer, size.known, row)
    labelled = {}
    for name, kinds in PROPERTIES.items():
        # the project ships no medical texts
        with contextlib.suppress(DataError):
            labelled[name] = tuple(
                hashed_sequences(_read_kind(kind), tokenizer, 2 * size.labelled, row) for kind in kinds
            )
    return LeakTexts(rows[: size.owned], rows[size.owned : own], known, labelled)


@cache
def _read_kind(kind: str) -> tuple[str, ...]:
    """Read every text of a kind, once in a process: the sources of a large library take long to parse."""
    if kind == "answers":
        return tuple(example.text for example in TASKS["medquad"].load(None).examples)
    if kind == "encyclopedia":
        return tuple(paragraphs("wikitext2_valid.txt.gz"))
    sources: dict[str, Callable[[], Source]] = {
        "manual": lambda: open_source(PythonManualConfig()),
        "docstrings": lambda: open_source(PythonDocstringsConfig()),
        "code": StandardLibraryCode,
        "library": library_docstrings,
    }
    return tuple(texts_of(sources[kind]()))
