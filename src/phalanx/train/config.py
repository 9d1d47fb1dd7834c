"""The run file: its sections say which of four kinds of runs it describes, and that kind checks them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.config import Variants, check_relative_paths, load_config, pin_own_code
from phalanx.train.runs.domain import DomainRun
from phalanx.train.runs.federated import FederatedPipelineRun, FederatedRankRun, FederatedRun
from phalanx.train.runs.pipeline import PipelineRun
from phalanx.train.runs.split import SplitPipelineRun, SplitRun

__all__ = [
    "RUN_RECORD",
    "RUN_TYPES",
    "DomainRun",
    "FederatedPipelineRun",
    "FederatedRankRun",
    "FederatedRun",
    "GuardedRun",
    "PipelineRun",
    "PrivateRun",
    "RankedRun",
    "RunConfig",
    "SplitPipelineRun",
    "SplitRun",
    "StagedRun",
    "load_run",
    "run_type",
]

RUN_RECORD = "run.json"
"""The file of a run directory that says which run it is."""

RunConfig = PipelineRun | DomainRun | SplitRun | FederatedRun
"""A whole run; the sections that its engine has not are not there."""

StagedRun = PipelineRun | SplitPipelineRun
"""A run whose own workers serve stages."""

GuardedRun = StagedRun | FederatedPipelineRun
"""A run in which somebody owns a verified pipeline."""

RankedRun = DomainRun | FederatedRankRun
"""A run of which the model, or the model of each site, is trained by ranks."""

PrivateRun = PipelineRun | DomainRun | FederatedRun
"""A run that may hide its training rows."""


def run_type(sections: Mapping[str, Any]) -> type[RunConfig]:
    """Return the kind of run that has these sections; a run without another engine's section is a pipeline."""
    kind: type[RunConfig] = PipelineRun
    if "federated" in sections:
        by_ranks = FederatedRankRun if "parallel" in sections else FederatedRun
        kind = FederatedPipelineRun if "pipeline" in sections else by_ranks
    elif "split" in sections:
        split = sections["split"]
        shows_hidden_states = isinstance(split, dict) and split.get("workers_see_hidden_states") is True
        kind = SplitPipelineRun if shows_hidden_states else SplitRun
    elif "parallel" in sections or "deepspeed" in sections:
        kind = DomainRun
    kind.check_sections(sections)
    return kind


RUN_TYPES: Variants[RunConfig] = Variants(
    (PipelineRun, DomainRun, SplitRun, SplitPipelineRun, FederatedRun, FederatedRankRun, FederatedPipelineRun), run_type
)
"""Every kind of run, told apart by the sections that a run file has."""


def load_run(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file.

    Args:
        overrides: ``section.key=value`` strings.

    Guarantees:
        Code of the user's own that the file names is pinned by its digest and not run.
    """
    path = Path(path)
    run = load_config(path, RUN_TYPES, overrides, pin_own_code).placed_at(path.stem, path.parent)
    if not (run.home / RUN_RECORD).exists():
        # in the directory of a run they are those of the run file that it was begun with
        check_relative_paths(run.model_dump(mode="json"), path)
    return run
