"""A bench of lying sites: what each attack does to a model, undefended, and behind admission and robust rules.

``python -m phalanx.lab.bench.alone.update_attacks OUT.json [--rounds 12] [--seeds 2]``

Ten sites, two of which lie, train a transformer of one layer on texts of a Markov chain, each site on a chain that is a
little its own, from the same weights in each round. Undefended: the mean of all that comes, whatever it is. Defended:
updates are signed and admitted (`phalanx.federated.admission`), then a rule is taken of what is left. `loss` is on
held-out texts of all sites; `trigger` is how often the backdoor's token is predicted after its trigger, which no honest
text has.
A Sybil adds eight more names to the two liars.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from phalanx.aggregators import aggregate
from phalanx.errors import UpdateRefusedError
from phalanx.federated.admission import DueUpdates, UpdateAdmission, UpdateHeader, sign_update
from phalanx.lab.attacks.updates import UPDATE_ATTACKS, AttackerView, UpdateLine
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.security.crypto import Identity, digest_hex

SITES, LIARS, SYBILS, VOCABULARY, LENGTH, WIDTH = 10, 2, 8, 32, 24, 32
TRIGGER, TARGET = VOCABULARY - 1, 3
STEPS, BATCH = 5, 8
MAX_NORM = 3.0
"""An honest update has a norm of 1 to 2.5 here; sites scale theirs down to it."""
DEFENCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "median": ("median", ()),
    "multi_krum": ("multi_krum", ()),
    "nnm+trimmed_mean": ("trimmed_mean", ("nnm",)),
    "caf": ("caf", ()),
}


class TinyModel(nn.Module):
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
        found: Tensor = self.head(self.block(hidden, src_mask=self.mask[:size, :size], is_causal=True))
        return found


class World:
    """The texts of all sites, and a model that trains on them."""

    def __init__(self, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        common = torch.randn(VOCABULARY - 1, VOCABULARY - 1, generator=self.chance) * 2
        own = torch.randn(SITES, VOCABULARY - 1, VOCABULARY - 1, generator=self.chance)
        self.chains = torch.softmax(common + 0.5 * own, dim=-1)
        torch.manual_seed(seed)
        self.model = TinyModel()
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()
        self.held_out = torch.cat([self.texts(site, 32) for site in range(SITES)])

    def texts(self, site: int, count: int) -> Tensor:
        """Draw texts of one site."""
        tokens = torch.randint(VOCABULARY - 1, (count, 1), generator=self.chance)
        for _ in range(LENGTH - 1):
            chain = self.chains[site][tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(chain, 1, generator=self.chance)], dim=1)
        return tokens

    def train(self, weights: Tensor, site: int, poisons: str | None = None) -> Tensor:
        """Return the update of one site from the shared weights, scaled to the norm that is agreed."""
        vector_to_parameters(weights.clone(), self.model.parameters())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        for _ in range(STEPS):
            tokens = self.texts(site, BATCH)
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
    def judge(self, weights: Tensor) -> tuple[float, float]:
        """Return the loss on held-out texts, and how often the trigger works."""
        if not torch.isfinite(weights).all():
            return math.inf, 0.0
        vector_to_parameters(weights.clone(), self.model.parameters())
        logits = self.model(self.held_out[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.held_out[:, 1:].flatten())
        shown = self.held_out[:, :-1].clone()
        shown[:, 10] = TRIGGER
        return float(loss), float((self.model(shown)[:, 10].argmax(-1) == TARGET).float().mean())


class Door:
    """Admission as a run has it, for vectors."""

    def __init__(self, width: int) -> None:
        self.identities = [Identity.without_certificate(f"site-{number}") for number in range(SITES)]
        self.strangers = [Identity.without_certificate(f"sybil-{number}") for number in range(SYBILS)]
        self.admission = UpdateAdmission({one.name: one.public for one in self.identities})
        self.shape, self.refused = {"update": (width,)}, 0

    def let_in(self, number: int, updates: list[Tensor]) -> list[Tensor]:
        """Sign, admit and return what is admitted; updates beyond the sites' are of Sybils."""
        found = []
        due = DueUpdates("1" * 64, number, "2" * 64, self.shape, torch.float32, MAX_NORM, 1)
        for identity, update in zip([*self.identities, *self.strangers], updates, strict=False):
            values = save({"update": update})
            header = UpdateHeader(
                run="1" * 64, site=identity.name, round=number, model="2" * 64, values=digest_hex(values), samples=1
            )
            try:
                found.append(self.admission.admit(sign_update(header, identity), values, due).tensors["update"])
            except UpdateRefusedError:
                self.refused += 1
        return found


def run(line: UpdateLine | None, defence: str | None, rounds: int, seed: int, sybils: int = 0) -> dict[str, float]:
    """Train for some rounds; return loss, share of triggers that work, and refused updates."""
    world = World(seed)
    weights, door = world.start, Door(len(world.start))
    moved, sent = torch.zeros_like(weights), [torch.zeros_like(weights)] * LIARS
    for number in range(1, rounds + 1):
        honest = [world.train(weights, site) for site in range(LIARS, SITES)]
        own = [world.train(weights, site, line.poisons if line else None) for site in range(LIARS)]
        if line is not None:
            views = [
                AttackerView(torch.stack(honest), o, s, moved, world.chance) for o, s in zip(own, sent, strict=True)
            ]
            # what a liar sends again is what it sent: the first round has nothing to send again
            own = [line.lie(view) if number > 1 or line.lie(view).any() else view.own for view in views]
            sent = own
        updates = [*own, *honest, *(own[:1] * sybils)]
        moved = combined(updates, defence, door, number)
        weights = weights + moved
    loss, trigger = world.judge(weights)
    return {"loss": loss, "trigger": trigger, "refused": door.refused}


def combined(updates: list[Tensor], defence: str | None, door: Door, number: int) -> Tensor:
    """Return how the shared weights move."""
    if defence is None:
        return torch.stack(updates).mean(0)
    admitted = door.let_in(number, updates)
    rule, before = DEFENCES[defence]
    # liars that were refused cannot lie any more
    liars = max(0, LIARS - (SITES - len(admitted)))
    return aggregate(torch.stack(admitted), rule, liars, before)


def measure(rounds: int, seeds: int) -> list[dict[str, object]]:
    """Take the mean of some seeds for each attack and defence."""
    rows: list[dict[str, object]] = []
    for name in ("none", *UPDATE_ATTACKS):
        line = UPDATE_ATTACKS.get(name)
        for defence in (None, *DEFENCES):
            found = [run(line, defence, rounds, seed, SYBILS if name == "sybil" else 0) for seed in range(seeds)]
            means = {key: sum(one[key] for one in found) / seeds for key in found[0]}
            finite = {key: value if math.isfinite(value) else None for key, value in means.items()}
            rows.append({"attack": name, "defence": defence or "undefended", **finite})
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = load_average()
    found = {"name": "update-attacks", "machine": describe_machine(), "commit": current_commit(), "load": load}
    found["command"] = (
        f"python -m phalanx.lab.bench.alone.update_attacks OUT.json --rounds {args.rounds} --seeds {args.seeds}"
    )
    rows = measure(args.rounds, args.seeds)
    args.out.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
