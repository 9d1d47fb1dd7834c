"""The workshop makes the material of a cell: the model and its front's outputs of a text once, clients once a seed."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from phalanx.data.config import ModelTokenizerConfig
from phalanx.data.tasks import TASKS, LabelledExamples
from phalanx.data.tokenizers import TextTokenizer, load_tokenizer
from phalanx.errors import DataError
from phalanx.lab.reproduce.medical.bench import ArmMaterial
from phalanx.lab.reproduce.medical.cell import MedicalCell, Row, run_cell
from phalanx.lab.reproduce.medical.front import RememberedFront, typical_length
from phalanx.lab.reproduce.medical.material import Material, make_material
from phalanx.lab.reproduce.medical.size import MODEL, MedicalSize
from phalanx.models import ModelSource, open_model
from phalanx.split import FrontPart

Say = Callable[[str], None]

_PUBLIC_TEXT = "The patient was admitted to hospital with a fever and was sent home after three days."
"""A text from which the clipping length of the noised split is taken: it must not depend on a client's texts."""


class MedicalLab:
    """A runner of cells that keeps models, states and clients for the next cell."""

    def __init__(self, size: MedicalSize, tasks: Mapping[str, LabelledExamples], cache: Path, say: Say) -> None:
        self._size, self._tasks, self._cache, self._say = size, tasks, cache, say
        self._model: tuple[ModelSource, TextTokenizer, RememberedFront] | None = None
        self._material: tuple[tuple[str, int], Material] | None = None

    def __call__(self, cell: MedicalCell) -> Row:
        """Run one cell."""
        source, tokenizer, front = self._open_model()
        if self._material is None or self._material[0] != (cell.task, cell.seed):
            material = make_material(self._tasks[cell.task], tokenizer, self._size, cell.seed)
            self._material = ((cell.task, cell.seed), material)
        bench = ArmMaterial(source, front, self._clip_norm(), self._material[1], self._size, cell.seed)
        return run_cell(cell, bench)

    def _open_model(self) -> tuple[ModelSource, TextTokenizer, RememberedFront]:
        if self._model is None:
            self._say(f"opening {MODEL.name}")
            source = open_model(MODEL, self._cache / "models", 0).with_first_blocks(self._size.layers)
            tokenizer = load_tokenizer(ModelTokenizerConfig(), source.tokenizer_path)
            self._model = (source, tokenizer, RememberedFront(FrontPart(source, self._size.cut)))
        return self._model

    def _clip_norm(self) -> float:
        _, tokenizer, front = self._open_model()
        ids = torch.tensor(tokenizer.encode_texts([_PUBLIC_TEXT]), dtype=torch.int64)
        return typical_length(front, ids)


def load_tasks(size: MedicalSize, home: Path | None) -> tuple[dict[str, LabelledExamples], dict[str, str]]:
    """Read the tasks of a home directory; return them and a reason for each missing one.

    Args:
        home: Folder of data files; None means the usual places.
    """
    tasks, absent = {}, {}
    for name in size.tasks:
        try:
            tasks[name] = TASKS[name].load(home)
        except DataError as exc:
            absent[name] = str(exc)
    return tasks, absent
