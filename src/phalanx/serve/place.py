"""The place of a model that is to be opened: looked at before torch is imported."""

from pathlib import Path

from phalanx.errors import ModelError

_CHECKPOINTS = "checkpoints"
_STEP = "step-"


def checkpoint_place(where: Path) -> tuple[Path, int] | None:
    """Return the run directory and the step of a path that is a checkpoint in one; None of any other path.

    Raises:
        ModelError: It is in the place of a checkpoint and has no name of one.
    """
    if where.parent.name != _CHECKPOINTS or not where.name.startswith(_STEP):
        return None
    number = where.name.removeprefix(_STEP)
    if not number.isdecimal():
        raise ModelError(f"{where}: is no checkpoint's name; expected step-00000100 or the like")
    return where.parent.parent, int(number)


def is_run(where: Path) -> bool:
    """Whether the directory is that of a run."""
    return (where / "config.toml").is_file()


def check_place(where: Path) -> None:
    """Return where a path is that of a run, of a checkpoint in one, or of a model."""
    place = checkpoint_place(where)
    directory = where if place is None else place[0]
    if not is_run(directory) and not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            do = "give the run that trained it, or what `phalanx model merge` wrote of it and its model"
            raise ModelError(f"{where}: is an adapter without its model; {do}").with_facts(
                code="PHX-I030", file=str(where), found="adapter_config.json", expected="a run or a whole model", do=do
            )
        raise ModelError(
            f"{where}: holds neither a run (config.toml) nor a model (config.json); give a run directory, a checkpoint "
            "in one, or a directory in the hub's layout"
        ).with_facts(code="PHX-I030", file=str(where))
