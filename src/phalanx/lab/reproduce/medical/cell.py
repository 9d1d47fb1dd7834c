"""One training of the medical comparison: a task, a seed, an arm."""

import hashlib
import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from phalanx.config import canonical_json
from phalanx.data.tasks import majority_share
from phalanx.lab.reproduce.medical.arms import ARMS
from phalanx.lab.reproduce.medical.bench import ArmMaterial, ArmResult
from phalanx.lab.reproduce.medical.size import MedicalSize

Row = dict[str, Any]

LATE = ("split_noised", "split_masked")
"""Arms that wait for all others: an interrupted sweep is then of more use."""
_TASKS_AT_ONCE = 3


@dataclass(frozen=True)
class MedicalCell:
    """The parameters of a row of raw results."""

    task: str
    seed: int
    arm: str

    @property
    def medical_label(self) -> str:
        """One line for the progress."""
        return f"{self.task}, seed {self.seed}: {self.arm}"


def cells_of(size: MedicalSize, tasks: Iterable[str]) -> list[MedicalCell]:
    """All cells of these tasks, three tasks after the other; in these late arms come last, seed by seed."""
    ordered = []
    names = list(tasks)
    for begin in range(0, len(names), _TASKS_AT_ONCE):
        three = names[begin : begin + _TASKS_AT_ONCE]
        cells = [MedicalCell(task, seed, arm) for task in three for seed in size.seeds for arm in size.arms or ARMS]
        ordered += sorted(cells, key=lambda cell: (cell.seed, LATE.index(cell.arm)) if cell.arm in LATE else (-1, 0))
    return ordered


def missing_part(arm: str) -> str | None:
    """Say what an arm needs and this installation has not; None where it can be run."""
    if arm.startswith("tfidf") and importlib.util.find_spec("sklearn") is None:
        return "needs scikit-learn: install phalanx-train[tasks]"
    if arm == "fedavg_private" and importlib.util.find_spec("opacus") is None:
        return "needs opacus's accountant: install phalanx-train[dp]"
    return None


def run_cell(cell: MedicalCell, bench: ArmMaterial) -> Row:
    """Run one training to its end."""
    started, cpu = time.perf_counter(), time.process_time()
    outcome = ARMS[cell.arm](bench)
    material = bench.material
    return {
        **asdict(cell),
        **{
            "accuracy": fmean(score.accuracy for score in outcome.scores),
            "macro_f1": fmean(score.macro_f1 for score in outcome.scores),
        },
        "majority": majority_share(material.train_examples, material.test_examples),
        "train": len(material.train.classes),
        "test": len(material.test.classes),
        "client_texts": [len(client) for client in material.clients],
        "client_classes": [len({material.train.classes[index] for index in client}) for client in material.clients],
        "steps": outcome.steps or None,
        "loss_last": outcome.loss_last,
        "weights_digest": outcome.digest,
        **_other_figures(outcome),
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
    }


def not_measured(cell: MedicalCell, why: str) -> Row:
    """The row of a cell that cannot be run here; it is not kept."""
    return {**asdict(cell), "accuracy": None, "macro_f1": None, "weights_digest": None, "note": why}


def runnable_cells(cells: Sequence[MedicalCell]) -> Iterator[MedicalCell]:
    """Yield the cells with an arm that has all it needs here."""
    return (cell for cell in cells if missing_part(cell.arm) is None)


def _other_figures(outcome: ArmResult) -> Row:
    more = dict(outcome.more)
    losses = more.pop("losses", None)
    if losses is None:
        return more
    # every loss, bit for bit: what two runs of one split must agree on
    return more | {"losses_digest": hashlib.sha256(canonical_json([float(loss).hex() for loss in losses])).hexdigest()}
