"""An owner and sites in one process: each site's loss is a parabola, so that every round has a closed form."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from memory_carrier import MemoryCarrier
from torch import Tensor

from phalanx.errors import AggregationError
from phalanx.federated.carriers.carrier import CarriedReply, LostSite
from phalanx.federated.config import FederatedConfig
from phalanx.federated.local import LocalUpdate, SiteScores
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import Identity
from phalanx.security.privacy import BudgetLedger, PrivacyConfig

OWNER = Identity.without_certificate("owner")
IDENTITIES = {name: Identity.without_certificate(name) for name in [f"site-{number}" for number in range(15)]}
RUN = "1" * 64


class Parabola:
    """A trainer with the loss ``curve / 2 * |w - target|^2``; a `LocalTrainer`."""

    def __init__(self, target: Tensor, curve: float = 1.0, steps: int = 1, samples: int = 1) -> None:
        self.target, self.curve, self.steps, self.samples = target, curve, steps, samples
        self.num_trained = 0

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"w": tuple(self.target.shape)}

    def train_round(self, number, start, rate, rule):
        self.num_trained += 1
        weights = {"w": start["w"].clone()}
        for _ in range(self.steps):
            gradients = {"w": self.curve * (weights["w"] - self.target)}
            rule.correct_gradients(gradients, weights)
            weights["w"] -= rate * gradients["w"]
        loss = self.curve / 2 * float((start["w"] - self.target).square().sum())
        return LocalUpdate({"w": weights["w"] - start["w"]}, self.samples, loss, 10, self.steps)

    def measure_weights(self, weights):
        return SiteScores(float((weights["w"] - self.target).square().sum()), 1)


class BookInMemory:
    """A book of rounds that lives as long as the test."""

    def __init__(self) -> None:
        self.last = 0

    def enter_round(self, run: str, number: int) -> None:
        if number <= self.last:
            raise AggregationError(SumRefusal.REPEATED_ROUND, f"round {number}")
        self.last = number


class SlowCarrier(MemoryCarrier):
    """A carrier with sites that can be hung or killed.

    Attributes:
        hung: Sites that answer nothing until they are taken out again.
        deadly: Sites that are gone at the first order of a kind, by (kind, phase).
        replies: All that came, to be sent again.
    """

    def __init__(self, sites) -> None:
        super().__init__(sites)
        self.hung: set[str] = set()
        self.deadly: dict[str, str] = {}
        self.replies: list[CarriedReply] = []
        self.again: list[CarriedReply] = []

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        if self.again:
            return self.again.pop(0)
        for _ in range(len(self._sent)):
            name, sent = self._sent[0]
            if name in self.hung:
                self._sent.rotate(-1)
                continue
            if self.deadly.get(name, "never") in (sent.order.kind, getattr(sent.order, "phase", None)):
                self.sites.pop(name)
            found = super().collect_reply(timeout_s)
            if isinstance(found, CarriedReply):
                self.replies.append(found)
            return found
        return None


class Scene:
    """An owner, and a site for each trainer.

    Args:
        home: Journal and the sites' own directories.
        trainers: One each.
        rows: What each site's own rows may spend; None where they are not private.
        section: Keys of ``[federated]`` beside `sites`.
    """

    def __init__(self, home: Path, trainers: list[Parabola], rows: PrivacyConfig | None = None, **section) -> None:
        self.home, self.trainers = home, dict(zip(IDENTITIES, trainers, strict=False))
        names = tuple(self.trainers)
        self.config = FederatedConfig.model_validate_json(json.dumps({"sites": names, "max_norm": 1e6, **section}))
        roster = {name: one.public for name, one in IDENTITIES.items() if name in self.trainers}
        self.terms = RunTerms("run-1", RUN, self.config, 0, OWNER.public, roster, 10, rows)
        self.books = {name: BookInMemory() for name in names}
        self.carrier = SlowCarrier({})
        for name in names:
            self.begin_site(name)
        self.begin_owner()

    @classmethod
    def of_trainers(cls, home: Path, trainers, weights, **section) -> "Scene":
        """A scene of any trainers, with weights to begin with."""
        scene = cls.__new__(cls)
        scene.first = weights
        cls.__init__(scene, home, trainers, **section)
        return scene

    def begin_site(self, name: str) -> None:
        """Begin a site's process, anew where there was one."""
        directory = self.home / name
        directory.mkdir(parents=True, exist_ok=True)
        site = Site(IDENTITIES[name], self.terms, self.trainers[name], self.books[name], directory)
        self.carrier.sites[name] = site.answer_order

    def begin_owner(self, weights: Tensor | None = None) -> None:
        """Begin the owner's process, anew where there was one; sites of this machine end with it."""
        for name in self.trainers:
            self.begin_site(name)
        self.carrier._sent.clear()
        self.fleet = Fleet(self.carrier)
        shapes = next(iter(self.trainers.values())).trained_shapes()
        first = getattr(self, "first", None) or {name: torch.zeros(shape) for name, shape in shapes.items()}
        first = first if weights is None else {"w": weights.clone()}
        self.journal = RoundJournal(self.home / "journal")
        self.owner = RoundCoordinator(
            self.terms, self.summed_by(), self.fleet, self.journal, dict(first), self.budget()
        )

    def summed_by(self):
        """What makes sums: the owner, or an aggregator."""
        return OWNER

    def budget(self) -> BudgetLedger | None:
        """What sums are charged to."""
        return None

    @property
    def w(self) -> Tensor:
        return self.owner.weights["w"]


def parabolas(*targets, **more) -> list[Parabola]:
    return [Parabola(torch.tensor(one, dtype=torch.float32), **more) for one in targets]
