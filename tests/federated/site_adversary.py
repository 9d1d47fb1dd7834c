"""An adversary that tries everything: one site of a round, and whatever it can say once or every time.

A schedule is one point of a round (an order of the owner), one act there (`site_acts`, derived from the schemas), and
when its reply comes. The real owner and the real sites play each schedule in one process: one honest round, an attacked
one (two where the act is done every time), and honest ones.

What must hold: no honest site is shut out; nothing but `FailedRoundError` is raised; a round that counts moves the
model by the honest updates of the sites that it names, and by no more of the attacker than the bound; which sites are
missing is said; and once the attacker is silent a round has all honest sites again.
"""

import contextlib
import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory_carrier import MemoryCarrier
from rounds_scene import IDENTITIES, Parabola, Scene
from site_acts import LENGTH, Act, View, field_acts, reply_acts, statement_acts, value_acts

from phalanx.errors import FailedRoundError
from phalanx.federated.carriers.carrier import CarriedReply, SentOrder
from phalanx.federated.enclave.aggregator import AggregatorState, EnclaveAggregator
from phalanx.security.aggregate import messages as sums
from phalanx.security.crypto import NotRollbackProofCounter
from phalanx.security.tee import SimAttester
from phalanx.split.hardware.measure import measure_code

SITES, MAX_NORM = 5, 4.0
RATE = 0.5
MAX_TRIES = 4
"""Of one round, as `train.max_failed_batches` has them by default."""
WHENS = ("early", "late", "twice", "again")
"""Before all others; after them; before the honest reply; after it."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {"min_cohort": 3},
    "rule": {"min_cohort": 3, "aggregator": "median", "byzantine": 1},
    "masked": {"min_cohort": 3, "secure": True},
    "homomorphic": {"min_cohort": 3, "secure": True, "sums": "homomorphic", "keepers": ["site-0", "site-1"]},
    "enclave": {
        "min_cohort": 4,
        "secure": True,
        "sums": "enclave",
        "enclave": {"tier": "sim", "allow_insecure_sim": True},
    },
}
ACTORS = {"homomorphic": ("site-4", "site-0")}
"""Attackers, where a site's role matters; otherwise the last one."""


@dataclass(frozen=True)
class Schedule:
    """One run of the adversary.

    Attributes:
        mode: Key of `MODES`.
        actor: The attacker.
        point: Kind of the order that it answers, and its phase.
        name: Of the act, for people.
        act: Makes what is sent from the honest reply.
        when: One of `WHENS`.
        always: Whether it is done in each round, and not once.
        section: Keys of the run file that the schedule changes.
    """

    mode: str
    actor: str
    point: tuple[str, str]
    name: str
    act: Act
    when: str = "late"
    always: bool = False
    section: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        how = "always" if self.always else "once"
        return f"{self.mode}/{self.actor}/{'.'.join(self.point).strip('.')}/{self.name}/{self.when}/{how}"


class AdversaryCarrier(MemoryCarrier):
    """A carrier with sites that all answer at once, and one of which lies in its turn."""

    def __init__(self, sites) -> None:
        super().__init__(sites)
        self.schedule: Schedule | None = None
        self.num_acts = 0
        self.points: dict[str, list[tuple[str, str]]] = {}
        self._stale: dict[tuple[str, tuple[str, str]], CarriedReply] = {}
        self._replies: list[CarriedReply] = []

    def broadcast_orders(self, orders) -> None:
        replies = {}
        for name, sent in orders.items():
            reply, payload = self.sites[name](sent.order, sent.payload)
            replies[name] = CarriedReply(name, reply.kind, reply.model_dump(mode="json"), bytes(payload))
            self.points.setdefault(name, []).append(_point(sent))
        self._replies = [*self._replies, *self._with_act(orders, replies)]
        for name, reply in replies.items():
            self._stale[name, _point(orders[name])] = reply

    def _with_act(self, orders, replies) -> list[CarriedReply]:
        schedule, others = self.schedule, list(replies.values())
        if schedule is None or schedule.actor not in orders or _point(orders[schedule.actor]) != schedule.point:
            return others
        if self.num_acts and not schedule.always:
            return others
        self.num_acts += 1
        actor, own = schedule.actor, replies[schedule.actor]
        others = [reply for reply in others if reply.site != actor]
        other = replies.get("site-1", own) if others else own
        stale = self._stale.get((actor, schedule.point))
        lie = schedule.act(View(orders[actor], copy.deepcopy(own), copy.deepcopy(other), stale, dict(replies)))
        lies = [] if lie is None else [CarriedReply(actor, lie.kind, lie.body, lie.payload)]
        if lie is not None:
            adopt(self.sites[actor].__self__, schedule.point[1], lie)
        return {
            "early": [*lies, *others],
            "late": [*others, *lies],
            "twice": [*lies, own, *others],
            "again": [*others, own, *lies],
        }[schedule.when]

    def collect_reply(self, timeout_s: float) -> CarriedReply | None:
        return self._replies.pop(0) if self._replies else None


def _point(sent: SentOrder) -> tuple[str, str]:
    return sent.order.kind, getattr(sent.order, "phase", "")


def adopt(site, phase: str, lie: CarriedReply) -> None:
    """Have the attacker's own client stand by what it said, so that it takes part in the phases after it."""
    if getattr(site, "_sum", None) is None or phase not in ("join", "mask"):
        return
    client = site._sum[1]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if phase == "join":
            client._own_advert = sums.SignedMessage[sums.Advert].model_validate_json(lie.payload)
        else:
            client._payload = json.loads(lie.body["message"])["body"]["payload"]


class AdversaryScene(Scene):
    """An owner and sites with random targets, one of which may lie."""

    def __init__(self, home: Path, mode: str, **section) -> None:
        draw = torch.Generator().manual_seed(7)
        targets = torch.nn.functional.normalize(torch.randn(SITES, LENGTH, generator=draw), dim=1) * 3
        super().__init__(home, [Parabola(one) for one in targets], max_norm=MAX_NORM, **MODES[mode], **section)
        self.targets = dict(zip(self.trainers, targets, strict=True))
        self.adversary = self.carrier = AdversaryCarrier(self.carrier.sites)
        self.begin_owner()

    def begin_owner(self, weights=None) -> None:
        self.carrier._sent.clear()
        super().begin_owner(weights)

    def summed_by(self):
        if self.config.sums != "enclave":
            return super().summed_by()
        home = self.home / "enclave"
        home.mkdir(parents=True, exist_ok=True)
        counters = [NotRollbackProofCounter(home / name) for name in ("sealed", "settled")]
        state = AggregatorState(home, bytes(32), self.terms.run, *counters)
        return EnclaveAggregator(
            self.terms, {"w": (LENGTH,)}, SimAttester(IDENTITIES["site-11"], measure_code()), state
        )

    def update_of(self, site: str, weights: torch.Tensor) -> torch.Tensor:
        """What an honest site sends."""
        return RATE * (self.targets[site] - weights)


def play(schedule: Schedule, home: Path) -> str:
    """Play one schedule; return what broke, or nothing."""
    try:
        scene = AdversaryScene(home, schedule.mode, **dict(schedule.section))
    except ValueError:
        # a run file that is refused by name plays no round
        return ""
    number, attacked = 1, ((False, True, True, False) if schedule.always else (False, True, False))
    for is_attacked in attacked:
        scene.adversary.schedule = schedule if is_attacked else None
        broken, is_over = _round(scene, schedule, number, is_attacked)
        if broken:
            return f"round {number}: {broken}"
        number += is_over
    if not is_over:
        broken, is_over = _round(scene, schedule, number, False)
        if broken or not is_over:
            return f"round {number}: {broken or 'cannot be finished'}"
        number += 1
    scene.adversary.schedule = None
    # the last one is of honest sites alone: the run has gone on
    broken, is_over = _round(scene, schedule, number, False, is_last=True)
    return f"round {number}: {broken}" if broken else "" if is_over else f"round {number}: the run does not go on"


def _round(scene, schedule: Schedule, number: int, is_attacked: bool, is_last: bool = False) -> tuple[str, bool]:
    """Play a round as the loop does, tries and all; return what broke, and whether it came to its end."""
    for _ in range(MAX_TRIES):
        before = scene.w.clone()
        try:
            record = scene.owner.run_round(number, RATE)
        except FailedRoundError:
            record = None
        except Exception as exc:  # noqa: BLE001 - whatever else is raised is what is looked for
            return f"{type(exc).__name__}: {exc}", False
        honest_out = sorted(scene.owner.excluded_sites.keys() - {schedule.actor})
        if honest_out:
            return f"shut out: {', '.join(honest_out)}: {scene.owner.excluded[honest_out[0]]}", False
        if record is not None:
            return _broken(scene, schedule, record, before, is_attacked, is_last), True
        if not torch.equal(scene.w, before):
            return "a failed round moved the model", False
    # a keeper that is not there, or lies, stops rounds
    stops = is_attacked and schedule.always and schedule.actor in scene.config.keepers
    return "" if stops else f"fails {MAX_TRIES} times", False


def _broken(scene, schedule: Schedule, record, before: torch.Tensor, is_attacked: bool, is_last: bool) -> str:
    moved, actor = scene.w - before, schedule.actor
    honest = [site for site in scene.trainers if site != actor]
    present = [site for site in honest if site in record.shares]
    unnamed = [site for site in record.asked if site not in record.shares and site not in record.left_out]
    if unnamed:
        return f"missing and not named: {', '.join(unnamed)}"
    if getattr(record, "lost", ""):
        return f"is lost: {record.lost}" if is_last or moved.any() or not (is_attacked or schedule.always) else ""
    may_miss = {"masked": 1, "homomorphic": SITES if actor in scene.config.keepers else 0}.get(schedule.mode, 0)
    if len(present) < len(honest) - (may_miss if is_attacked else 0):
        missing = {site: record.left_out.get(site) for site in honest if site not in present}
        return f"honest sites are missing: {missing}"
    return _moved_wrongly(scene, schedule, record, before, moved, present)


def _moved_wrongly(scene, schedule, record, before, moved, present) -> str:
    actor, updates = schedule.actor, {site: scene.update_of(site, before) for site in scene.trainers}
    honest = torch.stack([updates[site] for site in present])
    if scene.config.secure:
        everybody = torch.stack([updates[site] for site in record.shares])
        for site in record.shares:
            if any(torch.allclose(one, updates[site], atol=1e-3) for one in (moved, moved * len(record.shares))):
                return f"the update of {site} is in the open"
        if torch.isclose(moved, everybody, rtol=0, atol=1e-6).any(0).all():
            return "each value is that of a single site"
    if schedule.mode == "rule":
        low, high = honest.min(0).values, honest.max(0).values
        is_within = bool(((moved >= low - 1e-4) & (moved <= high + 1e-4)).all())
        if not is_within:
            return "the rule's result is not between those of honest sites"
    elif scene.config.aggregator == "mean":
        part = moved * len(record.shares) - honest.sum(0)
        bound = 0.0
        if actor in record.shares:
            hidden = schedule.mode in ("masked", "homomorphic")
            bound = 2 * SITES * MAX_NORM if hidden else MAX_NORM
        if float(part.norm()) > bound * (1 + 1e-4) + 1e-3:
            return f"the attacker moved the sum by {float(part.norm()):.3g}, at most {bound:.3g} is its own"
        if scene.config.secure and actor in record.shares:
            copies = [site for site in present if torch.allclose(part, updates[site], atol=1e-3)]
            if copies:
                return f"the attacker's part is that of {copies[0]}"
    return ""


# --- all schedules


def sampled(mode: str, actor: str, home: Path) -> dict[tuple[str, str], CarriedReply]:
    """Play an honest round; return the attacker's replies by point, of which acts are made."""
    scene = AdversaryScene(home, mode)
    scene.owner.run_round(1, RATE)
    scene.owner.measure_at_sites()
    stale = scene.adversary._stale
    return {point: reply for (site, point), reply in stale.items() if site == actor}


def schedules(mode: str, home: Path) -> Iterator[Schedule]:
    """Yield every single act of every attacker in a mode."""
    for actor in ACTORS.get(mode, ("site-4",)):
        for point, sample in sampled(mode, actor, home / actor).items():
            outer = [*reply_acts(), *field_acts(sample.kind, sample)]
            inner = [*value_acts(mode, actor, point), *statement_acts(mode, actor, point, sample)]
            # how often a reply comes is judged by its ticket alone, alike in all modes, and keys of BFV take a second
            outer_whens = WHENS[1:2] if mode == "homomorphic" else WHENS
            for acts, whens in ((outer, outer_whens), (inner, WHENS[:2])):
                for (name, act), when, always in itertools.product(acts, whens, (False, True)):
                    yield Schedule(mode, actor, point, name, act, when, always)
    if mode == "enclave":
        for rule in ("krum", "median", "geometric_median", "trimmed_mean", "multi_krum", "mda", "caf"):
            for few in (1, 0):
                section = (("aggregator", rule), ("byzantine", few))
                yield Schedule(
                    mode, "site-4", ("train", ""), f"{rule}, {few} may lie", lambda v: v.own, section=section
                )
