"""The section of a laboratory run file that chooses a defence of the paper, and the lies that it meets."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from phalanx.config import StrictModel, load_config
from phalanx.lab.reproduce.attacker import Attacker, LieSchedule
from phalanx.train import PipelineRun

Defence = Literal["none", "duplicated_block", "jumping_connection", "central_server"]
DEFENCES: tuple[Defence, ...] = get_args(Defence)

Lie = Literal["none", "forward", "backward", "false_input", "equivocation"]


class PaperSettings(StrictModel):
    """The section ``[paper]``.

    Attributes:
        defence: Who brings a duplicate the input of the stage that it repeats: the stage itself with its output
            (``duplicated_block``, as in the paper's release), the stage before it by a link of its own
            (``jumping_connection``, figure 3a), or a trusted server that relays everything (``central_server``,
            figure 3b).
        lie: ``forward`` and ``backward`` are the paper's attacks. With ``false_input`` a stage works on another input
            and shows that one; with ``equivocation`` a stage sends the next one an honest tensor, and another one to
            whoever repeats the next one's work.
        rate: Share of the steps in which a stage, drawn anew, lies.
    """

    defence: Defence
    lie: Lie = "none"
    rate: float = Field(default=0.5, ge=0.0, le=1.0)


class PaperRun(StrictModel):
    """A run file of the laboratory: a pipeline's run file with the section ``[paper]``; its guard and attack rest."""

    paper: PaperSettings
    run: PipelineRun

    @property
    def middle_stages(self) -> range:
        """The stages that workers hold; each has a duplicate on the stage behind it."""
        return range(1, self.run.pipeline.stages - 1)

    def make_attacker(self) -> Attacker:
        """Return the attacker, the same in every process."""
        if self.paper.lie == "none":
            return Attacker(None)
        direction: Literal["forward", "backward"] = "backward" if self.paper.lie == "backward" else "forward"
        return Attacker(LieSchedule(direction, self.paper.rate, tuple(self.middle_stages), self.run.train.seed))


def load_paper_run(path: Path, overrides: Iterable[str] = ()) -> PaperRun:
    """Read a run file of the laboratory.

    Args:
        overrides: ``section.key=value`` strings.

    Raises:
        ConfigError: Names the file, the key, the value found and the choices.
    """
    return load_config(path, PaperRun, overrides, _split_sections)


def _split_sections(sections: dict[str, Any], home: Path) -> None:
    """Take ``[paper]`` out of the other sections, which are a run's."""
    del home
    sections["run"] = {name: sections.pop(name) for name in list(sections) if name != "paper"}
