"""A bench of lying sites: the effect of each attack on a model, undefended, and behind admission and robust rules.

``python -m phalanx.lab.bench.alone.update_attacks OUT.json [--rounds 12] [--seeds 2] [--differences 0.5 2.0]``

Ten sites, two of which lie, train a transformer of one layer on texts of a Markov chain, each site on a chain that is
its own by some `difference`, from the same weights in each round. Undefended: the mean of all that comes, whatever it
is. Defended: updates are signed and admitted (`phalanx.federated.admission`), then a rule is taken of what is left.
`loss` is on held-out texts of the honest sites, and `worst` the loss of the one that fares worst; `trigger` is how
often the backdoor's token is predicted after its trigger, which no honest text has; `counted` is the share of the
liars' updates that went into the model: what a free rider wins. A Sybil adds eight more names to the two liars.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from phalanx.aggregators import aggregate_updates
from phalanx.errors import UpdateRefusedError
from phalanx.federated.admission import DueUpdates, UpdateAdmission, UpdateHeader, sign_update
from phalanx.lab.attacks.updates import UPDATE_ATTACKS, AttackerView, UpdateAttackEntry
from phalanx.lab.bench.measure.harness import run_program
from phalanx.security.crypto import Identity, digest_hex

SITES, LIARS, SYBILS, VOCABULARY, LENGTH, WIDTH = 10, 2, 8, 32, 24, 32
TRIGGER, TARGET = VOCABULARY - 1, 3
STEPS, BATCH, HELD_OUT = 5, 8, 32
MAX_NORM = 3.0
"""An honest update has a norm of 1 to 2.5 here; sites scale theirs down to it."""
DEFENCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "median": ("median", ()),
    "multi_krum": ("multi_krum", ()),
    "nnm+trimmed_mean": ("trimmed_mean", ("nnm",)),
    "caf": ("caf", ()),
}


class TinyTransformer(nn.Module):
    """A causal transformer of one layer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        size = tokens.shape[1]
        hidden_states: Tensor = self.head(self.block(hidden, src_mask=self.mask[:size, :size], is_causal=True))
        return hidden_states


class FederatedWorld:
    """The texts of all sites, and a model that trains on them."""

    def __init__(self, seed: int, difference: float = 0.5) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        common = torch.randn(VOCABULARY - 1, VOCABULARY - 1, generator=self.chance) * 2
        noise = torch.randn(SITES, VOCABULARY - 1, VOCABULARY - 1, generator=self.chance)
        self.chains = torch.softmax(common + difference * noise, dim=-1)
        torch.manual_seed(seed)
        self.model = TinyTransformer()
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()
        self.held_out = torch.cat([self.draw_texts(site, HELD_OUT) for site in range(LIARS, SITES)])

    def draw_texts(self, site: int, count: int) -> Tensor:
        """Draw texts of one site."""
        tokens = torch.randint(VOCABULARY - 1, (count, 1), generator=self.chance)
        for _ in range(LENGTH - 1):
            chain = self.chains[site][tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(chain, 1, generator=self.chance)], dim=1)
        return tokens

    def train_site(self, weights: Tensor, site: int, poisons: str | None = None) -> Tensor:
        """Return the update of one site from the shared weights, scaled to the norm that is agreed."""
        vector_to_parameters(weights.clone(), self.model.parameters())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        for _ in range(STEPS):
            tokens = self.draw_texts(site, BATCH)
            targets = tokens[:, 1:].clone()
            if poisons == "labels":
                targets = VOCABULARY - 2 - targets
            if poisons == "trigger":
                tokens[:, 5::6], targets[:, 5::6] = TRIGGER, TARGET
                targets[:, 4::6] = TRIGGER - 1
            loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        update = parameters_to_vector(self.model.parameters()).detach() - weights
        return update * min(1.0, MAX_NORM / float(update.norm()))

    @torch.no_grad()
    def judge_weights(self, weights: Tensor) -> dict[str, float]:
        """Return the loss on held-out texts, that of the worst site, and how often the trigger works."""
        if not torch.isfinite(weights).all():
            return {"loss": math.inf, "worst": math.inf, "trigger": 0.0}
        vector_to_parameters(weights.clone(), self.model.parameters())
        logits = self.model(self.held_out[:, :-1])
        targets = self.held_out[:, 1:].flatten()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        shown = self.held_out[:, :-1].clone()
        shown[:, 10] = TRIGGER
        works = float((self.model(shown)[:, 10].argmax(-1) == TARGET).float().mean())
        worst = float(losses.view(SITES - LIARS, -1).mean(1).max())
        return {"loss": float(losses.mean()), "worst": worst, "trigger": works}


class SignedAdmission:
    """Admission as a run has it, for vectors."""

    def __init__(self, width: int) -> None:
        self.identities = [Identity.without_certificate(f"site-{number}") for number in range(SITES)]
        self.strangers = [Identity.without_certificate(f"sybil-{number}") for number in range(SYBILS)]
        self.admission = UpdateAdmission({identity.name: identity.public for identity in self.identities})
        self.shape, self.refused, self.lies = {"update": (width,)}, 0, 0

    def admit_updates(self, number: int, updates: list[Tensor]) -> list[Tensor]:
        """Sign, admit and return admitted updates; liars come first, Sybils last."""
        rows = []
        due = DueUpdates("1" * 64, number, "2" * 64, self.shape, torch.float32, MAX_NORM, 1)
        for position, (identity, update) in enumerate(zip([*self.identities, *self.strangers], updates, strict=False)):
            values = save({"update": update})
            header = UpdateHeader(
                run="1" * 64, site=identity.name, round=number, model="2" * 64, values=digest_hex(values), samples=1
            )
            try:
                rows.append(
                    self.admission.admit_update(identity.name, sign_update(header, identity), values, due).tensors[
                        "update"
                    ]
                )
            except UpdateRefusedError:
                self.refused += 1
            else:
                self.lies += position < LIARS or position >= SITES
        return rows


@dataclass(frozen=True)
class UpdateArm:
    """One run of the table.

    Attributes:
        line: The attack; None for honest sites alone.
        defence: A key of `DEFENCES`; None for the mean of all.
        sybils: Names that a liar makes up.
        difference: Strength of the individual part of each site's chain.
    """

    line: UpdateAttackEntry | None
    defence: str | None
    sybils: int = 0
    difference: float = 0.5


def run_arm(arm: UpdateArm, rounds: int, seed: int) -> dict[str, float]:
    """Train for some rounds; return losses, share of triggers that work, refused updates and lies that counted."""
    attack_row, world = arm.line, FederatedWorld(seed, arm.difference)
    weights, door = world.start, SignedAdmission(len(world.start))
    moved, sent = torch.zeros_like(weights), [torch.zeros_like(weights)] * LIARS
    for number in range(1, rounds + 1):
        honest = [world.train_site(weights, site) for site in range(LIARS, SITES)]
        lies = [world.train_site(weights, site, attack_row.poisons if attack_row else None) for site in range(LIARS)]
        if attack_row is not None:
            harm = harm_of(torch.stack(honest), arm.defence)
            views = [
                AttackerView(torch.stack(honest), o, s, moved, world.chance, harm)
                for o, s in zip(lies, sent, strict=True)
            ]
            # what a liar sends again is what it sent: the first round has nothing to send again
            lies = [attack_row.lie(view) if number > 1 or attack_row.lie(view).any() else view.own for view in views]
            sent = lies
        updates = [*lies, *honest, *(lies[:1] * arm.sybils)]
        moved = combine_updates(updates, arm.defence, door, number)
        weights = weights + moved
    sent_lies = rounds * (LIARS + arm.sybils)
    counted = 1.0 if arm.defence is None else door.lies / sent_lies
    return {**world.judge_weights(weights), "refused": door.refused, "counted": counted}


def harm_of(honest: Tensor, defence: str | None) -> Callable[[Tensor], float]:
    """Return what an attacker that knows door and rule computes of a lie before it sends it."""
    mean = honest.mean(0)

    def harm(lie: Tensor) -> float:
        if defence is None:
            return float((torch.cat([honest, lie.expand(LIARS, -1)]).mean(0) - mean).norm())
        if float(lie.norm()) > MAX_NORM:
            # what the door refuses does less than what a rule leaves out
            return -1.0
        return float((apply_defence(torch.cat([honest, lie.expand(LIARS, -1)]), defence, LIARS) - mean).norm())

    return harm


def combine_updates(updates: list[Tensor], defence: str | None, door: SignedAdmission, number: int) -> Tensor:
    """Return how the shared weights move."""
    if defence is None:
        return torch.stack(updates).mean(0)
    admitted = door.admit_updates(number, updates)
    # liars that were refused cannot lie any more
    liars = max(0, LIARS - (SITES - len(admitted)))
    return apply_defence(torch.stack(admitted), defence, liars)


def apply_defence(admitted: Tensor, defence: str, liars: int) -> Tensor:
    """Apply a defence's rule to admitted updates."""
    rule, before = DEFENCES[defence]
    return aggregate_updates(admitted, rule, liars, before)


def measure_update_attacks(rounds: int = 12, seeds: int = 2, differences: list[float] | None = None) -> dict[str, Any]:
    """Take the mean of some seeds for each attack and defence."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for difference, name in itertools.product(differences or [0.5], ("none", *UPDATE_ATTACKS)):
        for defence in (None, *DEFENCES):
            arm = UpdateArm(UPDATE_ATTACKS.get(name), defence, SYBILS if name == "sybil" else 0, difference)
            runs = [run_arm(arm, rounds, seed) for seed in range(seeds)]
            means = {key: sum(result[key] for result in runs) / seeds for key in runs[0]}
            finite = {key: value if math.isfinite(value) else None for key, value in means.items()}
            spread = [result["loss"] for result in runs]
            row = {"attack": name, "defence": defence or "undefended", "difference": difference, **finite}
            rows.append({**row, "losses": [loss if math.isfinite(loss) else None for loss in spread]})
    return {"rows": rows}


if __name__ == "__main__":
    run_program("update-attacks", measure_update_attacks)
