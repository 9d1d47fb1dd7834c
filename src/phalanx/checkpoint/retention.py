"""The retention of checkpoints: which ones stay."""

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.manifest import list_checkpoints
from phalanx.errors import CheckpointError

logger = logging.getLogger(__name__)
REMOVING = ".removing-"


@dataclass(frozen=True)
class Retention:
    """A rule of retention: the newest checkpoints stay, and the checkpoints of certain steps for good.

    Attributes:
        keep: Newest ones, at least 1.
        keep_every: Multiples of this step stay for good; 0 keeps none for good.
        best: This one stays whatever its age; None for none.
    """

    keep: int
    keep_every: int = 0
    best: int | None = None

    def kept_steps(self, steps: Iterable[int], newest: int) -> set[int]:
        """Return the steps to keep; `newest`, which has just been written, is always among them.

        Steps after it, which a run that went back has left behind, are not.
        """
        present = sorted((step for step in steps if step <= newest), reverse=True)
        for_good = {step for step in present if self.keep_every and step and step % self.keep_every == 0}
        return {newest, *present[: self.keep], *for_good, *(step for step in present if step == self.best)}


def prune_checkpoints(directory: Path, newest: int, retention: Retention) -> None:
    """Remove checkpoints by the retention rule; a failure is a warning, for the new checkpoint is good."""
    try:
        checkpoints = list_checkpoints(directory)
        for step in sorted(checkpoints.keys() - retention.kept_steps(checkpoints, newest)):
            remove_checkpoint(checkpoints[step])
    except OSError as exc:
        logger.warning("%s: an old checkpoint cannot be removed (%s)", directory, exc.strerror)


def drop_checkpoints_after(directory: Path, step: int) -> None:
    """Remove every checkpoint of a later step."""
    for number, path in sorted(list_checkpoints(directory).items()):
        if number > step:
            try:
                remove_checkpoint(path)
            except OSError as exc:
                raise CheckpointError(f"{path}: cannot be removed ({exc.strerror}); remove it, then --resume") from exc


def remove_checkpoint(path: Path) -> None:
    """Remove one; renamed first, so that a crash in the middle leaves nothing that looks whole."""
    doomed = path.with_name(f"{REMOVING}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)
