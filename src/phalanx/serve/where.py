"""The model that a path means: a run, one of its checkpoints, or a directory in the hub's layout."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from phalanx.engine.device import check_device
from phalanx.errors import ModelError
from phalanx.serve.classifier_model import ClassifierModel
from phalanx.serve.place import check_place, checkpoint_place, is_run
from phalanx.serve.text_model import TextModel
from phalanx.train import PastRun, export_run

_Model = TypeVar("_Model")


def open_text_model(
    where: Path,
    *,
    step: int | None = None,
    best: bool = False,
    certificate: Path | None = None,
    own_code: bool = False,
    device: str = "cpu",
    stages: int = 1,
) -> TextModel:
    """Open the model at a path; of a run, a verified checkpoint, with its adapter added to the weights.

    Args:
        where: A run directory, a checkpoint in one, or a directory in the hub's layout.
        step: Checkpoint of a run; None takes the newest.
        best: Take the one with the best validation.
        certificate: The owner's, kept by the caller.
        own_code: Code of the user's own that the run directory keeps may be run.
        stages: Into how many processes of this machine the layers are cut.

    Raises:
        ModelError: There is neither, or no model that can be run.
        CheckpointError: The run has no such checkpoint, or it is damaged.
        ConfigError: The run needs code of the user's own, which may not be run, or this machine lacks the device.
    """
    check_device(device, "device")

    def open_directory(directory: Path) -> TextModel:
        return TextModel(directory, device, stages)

    return _open_place(where, open_directory, step=step, best=best, certificate=certificate, own_code=own_code)


def open_classifier(
    where: Path,
    *,
    step: int | None = None,
    best: bool = False,
    certificate: Path | None = None,
    own_code: bool = False,
    device: str = "cpu",
) -> ClassifierModel:
    """Open the model that classifies texts at a path, as `open_text_model` opens one that writes them."""
    check_device(device, "device")

    def open_directory(directory: Path) -> ClassifierModel:
        return ClassifierModel(directory, device)

    return _open_place(where, open_directory, step=step, best=best, certificate=certificate, own_code=own_code)


def _open_place(
    where: Path,
    open_directory: Callable[[Path], _Model],
    *,
    step: int | None,
    best: bool,
    certificate: Path | None,
    own_code: bool,
) -> _Model:
    """Open the model directory at a path; of a run, a spare one with a checkpoint's whole model."""
    place = checkpoint_place(where)
    if place is not None and step is None and not best:
        where, step = place
    if is_run(where):
        past = PastRun(where, certificate)
        with tempfile.TemporaryDirectory(prefix="phalanx-model-") as spare:
            directory = Path(spare) / "model"
            export_run(past, directory, step=step, best=best, merge=True, own_code=own_code)
            return open_directory(directory)
    check_place(where)
    if step is not None or best:
        raise ModelError(f"{where}: is a model directory, which has no checkpoints; leave --step and --best out")
    return open_directory(where)
