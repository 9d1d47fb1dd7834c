"""A trainer that looks at each client's gradient before it counts, and stands clients that lie."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.aggregators import AGGREGATORS
from phalanx.engine import NO_EXTRAS
from phalanx.errors import CheckpointError, FailedBatchError
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.admission.standings import ClientStandings
from phalanx.split.channel.client_order import client_of
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.trainer import BackTrainer

_MOMENTUM = "momentum/"
_UNCOUNTED = (0.0, 0)
"""Loss and targets of a microbatch that does not count."""


class AdmittingTrainer:
    """A `SplitTrainer` over the trainer of the whole back part.

    Args:
        whole: Computes the gradients, and takes the step.
        clients: Party names, in the order of their turns.
        config: Rules of admission, and the aggregator of the gradients.

    Attributes:
        counted: The clients that the last step was made of.

    Guarantees:
        A gradient that is not finite or over the norm changes nothing, and neither does any of a client that is shut
        out. With a robust rule, the step stands as many clients that send whatever they like as `byzantine` says.
    """

    def __init__(self, whole: BackTrainer, clients: Sequence[str], config: ClientAdmissionConfig) -> None:
        self._whole, self._clients, self._config = whole, tuple(clients), config
        self.client_standings = ClientStandings(clients, config)
        self.counted_clients: frozenset[str] = frozenset(clients)
        self._sums: dict[str, Tensor] = {}
        self._targets: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._momenta: dict[str, Tensor] = {}
        self._losses: list[tuple[float, int]] = []

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return self._whole.num_steps

    @property
    def num_learned(self) -> int:
        """Microbatches since the last step."""
        return self._whole.num_learned

    @property
    def step_losses(self) -> Sequence[tuple[float, int]]:
        """As `SplitTrainer` has them; loss 0 and no target of a microbatch that does not count."""
        return self._losses

    def learn_microbatch(self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS) -> None:
        """Take one microbatch of the next step; one of a client that does not count is passed over."""
        client = client_of(self.num_learned, self._clients)
        if not self.num_learned:
            self._losses = []
        if not self.client_standings.is_counted(client):
            self._whole.skip_microbatch()
            self._losses.append(_UNCOUNTED)
            return
        loss, targets = self._whole.learn_microbatch(hidden, labels, extras)
        gradient = self._whole.take_gradient()
        self._sums[client] = self._sums[client] + gradient if client in self._sums else gradient
        self._targets[client] = self._targets.get(client, 0) + targets
        self._losses.append((loss, targets))

    def measure_microbatch(
        self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `SplitTrainer` says."""
        return self._whole.measure_microbatch(hidden, labels, extras)

    def step(self) -> float:
        """Take one step with the aggregate of the admitted clients' gradients.

        Raises:
            FailedBatchError: No client's counts. Nothing was updated.
        """
        step, means = self.num_steps, self._take_means()
        self.client_standings.judge_measurements(step)
        norms = {name: float(torch.linalg.vector_norm(mean, dtype=torch.float64)) for name, mean in means.items()}
        passed = [
            name for name in self.client_standings.judge_norms(step, norms) if self.client_standings.is_counted(name)
        ]
        self.counted_clients = frozenset(passed)
        self._losses = [
            loss if client_of(number, self._clients) in self.counted_clients else _UNCOUNTED
            for number, loss in enumerate(self._losses)
        ]
        if not passed:
            raise FailedBatchError(f"step {step}: admission leaves no client's gradient")
        return self._whole.apply_gradients(
            self._whole.split_row(self._aggregate_means(step, {name: means[name] for name in passed})), 1
        )

    def drop_microbatches(self) -> None:
        """Drop the microbatches since the last step."""
        self._whole.drop_microbatches()
        self._sums.clear()
        self._targets.clear()

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Weights and moments of all that is trained, and the clients' earlier gradients."""
        return {
            **self._whole.state_tensors(),
            **{f"{_MOMENTUM}{name}": momentum for name, momentum in self._momenta.items()},
        }

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Go on from a state."""
        self.drop_microbatches()
        momenta = {
            name.removeprefix(_MOMENTUM): momentum for name, momentum in tensors.items() if name.startswith(_MOMENTUM)
        }
        if not momenta.keys() <= set(self._clients):
            raise CheckpointError(f"sealed state: has gradients of {sorted(momenta)[:5]}, which this run does not name")
        self._momenta = {name: momentum.clone() for name, momentum in momenta.items()}
        self._whole.load_state(
            {name: tensor for name, tensor in tensors.items() if not name.startswith(_MOMENTUM)}, num_steps
        )

    def trained_weights(self) -> Iterable[tuple[str, Tensor]]:
        """What is trained, by canonical name, as it is now."""
        return self._whole.trained_weights()

    def state_metadata(self) -> dict[str, object]:
        """The standings."""
        return self.client_standings.dump_standings()

    def check_metadata(self, books: Mapping[str, object]) -> None:
        """Take over the standings of a state that is about to be loaded."""
        self.client_standings.restore_standings(books)

    def _take_means(self) -> dict[str, Tensor]:
        """Each client's mean gradient over its targets of the step; a client without a target has none."""
        counted = {name: count for name, count in self._targets.items() if count}
        means = {name: self._sums[name] / count for name, count in counted.items()}
        self._weights = counted
        self.drop_microbatches()
        return means

    def _aggregate_means(self, step: int, means: Mapping[str, Tensor]) -> Tensor:
        if self._config.rule == "mean":
            total = sum(self._weights[name] for name in means)
            return torch.stack([mean * (self._weights[name] / total) for name, mean in means.items()]).sum(dim=0)
        for name, mean in means.items():
            before = self._momenta.get(name, mean)
            self._momenta[name] = torch.lerp(mean, before, self._config.momentum)
        rows = torch.stack([self._momenta[name] for name in means])
        rule = AGGREGATORS[self._config.rule]
        max_byzantine = rule.max_byzantine(len(rows))
        if max_byzantine < 0:
            raise FailedBatchError(
                f"step {step}: admission leaves {len(rows)} clients, too few for {self._config.rule}"
            )
        # those that are shut out are not among the rows; those that were refused once may be honest
        result = rule(
            rows, max(0, min(self._config.byzantine - len(self.client_standings.excluded_clients), max_byzantine))
        )
        distances = torch.linalg.vector_norm(rows - result, dim=1).tolist()
        self.client_standings.judge_distances(step, dict(zip(means, distances, strict=True)))
        return result
