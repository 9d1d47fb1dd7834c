"""The choice of a rank's engine: torch's own means, or DeepSpeed where the run file has a section for it."""

import contextlib
import math
from collections.abc import Iterator
from math import prod

from phalanx.config import digest_config
from phalanx.models import ModelSource, trained_shapes
from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, RankTrainer
from phalanx.parallel.control.rank0 import RankWork
from phalanx.parallel.deepspeed import check_machine, opened_member
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.privacy.trainer import PrivateRankTrainer
from phalanx.train.config import DomainRun, RankedRun


@contextlib.contextmanager
def open_member(
    run: RankedRun, recipe: RankRecipe, source: ModelSource, domain: Domain, place: RankEnv, noise: float = math.nan
) -> Iterator[RankWork]:
    """Be a rank of the run while the context lasts.

    Args:
        domain: This rank's place in the mesh.
        noise: The noise multiplier of a run with ``[privacy]``, on rank 0.
    """
    if run.privacy is not None:
        yield PrivateRankTrainer(recipe, source, domain, noise)
        return
    if not isinstance(run, DomainRun) or run.deepspeed is None:
        yield RankTrainer(recipe, source, domain)
        return
    with opened_member(run.deepspeed, recipe, source, domain, place, digest_config(run)) as member:
        yield member


def check_deepspeed(
    run: DomainRun, parallel: ParallelConfig, source: ModelSource, place: RankEnv | None, *, build: bool = False
) -> None:
    """Refuse a section ``[deepspeed]`` that this machine cannot carry out; other runs have none.

    Args:
        parallel: The layout for as many ranks as are there.
        place: Place of this process; None where this machine has all ranks.
    """
    if run.deepspeed is None:
        return
    # what is not trained is kept too, and never in more than as many bytes
    sizes = [prod(shape) for shape in trained_shapes(source.hub_config, None).values()]
    local = parallel.dp if place is None else min(parallel.dp, place.local_world)
    check_machine(run.deepspeed, sizes, parallel.dp, local, run.train.device, build=build)
