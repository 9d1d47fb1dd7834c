"""The setting of every arm of a training bench."""

from dataclasses import dataclass

from phalanx.models import ModelSource
from phalanx.parallel import RankEnv
from phalanx.train import RunConfig


@dataclass(frozen=True)
class RankSetup:
    """One rank's.

    Attributes:
        run: What is trained, and how.
        source: Its model.
        place: Which rank this is.
    """

    run: RunConfig
    source: ModelSource
    place: RankEnv
