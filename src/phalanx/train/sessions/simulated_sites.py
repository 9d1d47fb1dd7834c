"""Sites as objects of the owner's process, for experiments with many of them: NOT PRIVATE."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder
from phalanx.federated.carriers.messages import EndOrder
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.site_trainer import SiteSchedule, SiteTrainer, WholeModel
from phalanx.security.aggregate import RoundFile
from phalanx.security.crypto import load_identity, make_private_directory
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.config import FederatedRun

SIMULATED = (
    "SIMULATED SITES: NOT PRIVATE: all of them are in this process, which has their keys, texts and updates; "
    "updates and sums have the bits of site processes"
)


class SimulatedSites:
    """An `OpenCarrier` whose sites answer when their reply is collected, one after the other.

    Args:
        make_site: Makes a site as its process would when it starts.
        max_sites: Number of sites kept in memory, at least those of a round; another one begins anew when it is asked.

    Guarantees:
        Orders, signatures, admission, masks and sums are those of site processes: the same `Site` answers. Nothing is
        hidden from this process.
    """

    def __init__(self, names: tuple[str, ...], make_site: Callable[[str], Site], max_sites: int) -> None:
        self._names, self._make_site, self._max_sites = frozenset(names), make_site, max_sites
        self._sites: OrderedDict[str, Site] = OrderedDict()
        self._sent: deque[tuple[str, SentOrder]] = deque()

    def await_sites(self, least: int, timeout_s: float) -> frozenset[str]:
        """As `OpenCarrier` says; all are there."""
        del least, timeout_s
        return self._names

    def present_sites(self) -> frozenset[str]:
        """As `Carrier` says."""
        return self._names

    def broadcast_orders(self, orders: Mapping[str, SentOrder]) -> None:
        """As `Carrier` says."""
        self._sent.extend(orders.items())

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        """As `Carrier` says; nothing is ever waited for, and a deadline is none of a simulation's."""
        del timeout_s
        if not self._sent:
            return None
        name, sent = self._sent.popleft()
        if isinstance(sent.order, EndOrder):
            return None
        reply, payload = self._find_site(name).answer_order(sent.order, sent.payload)
        return CarriedReply(name, reply.kind, reply.model_dump(mode="json"), payload)

    def close(self) -> None:
        """Nothing was started."""

    def _find_site(self, name: str) -> Site:
        if name not in self._sites:
            self._sites[name] = self._make_site(name)
        self._sites.move_to_end(name)
        while len(self._sites) > self._max_sites:
            self._sites.popitem(last=False)
        return self._sites[name]


def simulate_sites(
    run: FederatedRun, terms: RunTerms, model: WholeModel, texts: SharedTexts, home: Path, pki: Path
) -> SimulatedSites:
    """Return the sites of a run in this process; one model serves them in turn.

    Args:
        model: Of the sites alone: their personal weights come and go in it.
        home: Directory with one of each site's own inside.
    """
    train, section = run.train, run.federated
    schedule = SiteSchedule(run.optimizer, section.local_steps, train.draws_per_step, train.microbatches, train.seed)

    def make_site(name: str) -> Site:
        directory = home / name
        make_private_directory(directory)
        trainer = SiteTrainer(model, texts.share_of(name), schedule, directory)
        return Site(load_identity(pki / name), terms, trainer, RoundFile(directory), directory)

    return SimulatedSites(section.sites, make_site, section.num_asked)
