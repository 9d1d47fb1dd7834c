"""The layers of each stage with which the slowest party is done soonest, by the measured speeds of the parties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.planner.cost.partition import uneven_layers


@dataclass(frozen=True)
class MeasuredParties:
    """The parties of a run that goes on.

    Attributes:
        owner_s: Seconds of a step that the owner needs for a layer.
        worker_s: The same of each worker that is left, in the order of the stages.
        edge_work: Work of embedding and head, which the owner does, in layers.
    """

    owner_s: float
    worker_s: Mapping[str, float]
    edge_work: float

    def slowest_seconds(self, owned: int, layers: Sequence[int]) -> float:
        """Return when the slowest party is done, with so many layers at the owner and at each worker."""
        workers = (count * seconds for count, seconds in zip(layers, self.worker_s.values(), strict=True))
        return max((owned + self.edge_work) * self.owner_s, *workers)


def propose_layers(num_layers: int, parties: MeasuredParties) -> tuple[int, ...] | None:
    """Return the layers of each stage: the owner's first and last, and one for each worker between them.

    Returns:
        Of equally fast cuts the one with fewest layers at the owner. None where a party would have no layer.
    """
    speeds = [1 / seconds for seconds in parties.worker_s.values()]
    cuts = []
    for owned in range(2, num_layers - len(speeds) + 1):
        middle = uneven_layers([1.0] * (num_layers - owned), speeds) if speeds else None
        if middle is not None:
            cuts.append((parties.slowest_seconds(owned, middle), owned, middle))
    if not cuts:
        return None
    _, owned, middle = min(cuts)
    return (owned - owned // 2, *middle, owned // 2)
