"""A bench of attacks on the traces of rows in training: each where nothing defends, and behind each defence.

``python -m phalanx.lab.bench.alone.privacy_attacks OUT.json [--sums 4] [--runs 3] [--members 120 1000]``

Inversion: the span check on one step's gradient of a LoRA matrix of rank 16, 64 tokens of 2000; the share of a client's
tokens among the likeliest, as many as it has. Beside it what lists would find that know of a sum what it says of all
its clients and nothing of one: `any_word`, words that stand in the sum, in any order; `commonest`, those that most of
its clients have; and `absent`, what the same list finds of a client that is in no sum. Property: whether a client's
text is about a topic, told from its update by the same check. Membership: rows of random tokens; the area under the
curve of the loss, and how many members are found where one stranger in a hundred is accused. Exposure of canaries that
stand once, four and sixteen times: log2 of candidates over the rank. Audit: coins decide which rows are in; what the
guesses prove.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.lab.bench.alone.private_world import LENGTH, VOCABULARY, train_rows
from phalanx.lab.bench.measure.harness import run_program
from phalanx.redteam.epsilon_bound import bound_from_one_run
from phalanx.redteam.inversion.span_check import outside_of_rows
from phalanx.security.privacy import SecureStream, gaussian_noise
from phalanx.security.privacy.leakage import area_under_curve

WORDS, TOKENS, WIDTH, RANK = 2000, 64, 256, 16
CLIENTS, TOPIC = 30, 40
MEMBERS, STRANGERS, STEPS, DELTA = 120, 1000, 60, 1e-4
COPIES = (1, 4, 16)
BATCH = (MEMBERS + sum(COPIES)) // 2
BUDGETS: tuple[float | None, ...] = (None, 8.0, 1.0)
NOISES = (0.5, 1.0)


class AdaptedModel:
    """A random Llama with a LoRA matrix pair at the first layer's values; its B has moved from zero."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes))
        for parameter in self.model.parameters():
            parameter.requires_grad = False
        self.first = nn.Parameter(torch.randn(RANK, WIDTH) / math.sqrt(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, RANK) * 0.02)
        values = self.model.model.layers[0].self_attn.v_proj
        values.register_forward_hook(lambda _, given, out: out + given[0] @ self.first.T @ self.second.T)

    def layer_inputs(self) -> Tensor:
        """What the adapted layer is given for each token: the attacker has the model."""
        embeddings: Tensor = self.model.model.layers[0].input_layernorm(self.model.model.embed_tokens.weight).detach()
        return embeddings

    def client_gradient(self, ids: Tensor) -> Tensor:
        """The gradient of the first matrix on one client's rows."""
        loss = self.model(input_ids=ids, labels=ids).loss
        return torch.autograd.grad(loss, self.first)[0]


def likeliest_tokens(gradient: Tensor, inputs: Tensor) -> Tensor:
    """The tokens, likeliest first."""
    return outside_of_rows(gradient, inputs).argsort()


def count_recalled(likeliest: Tensor, ids: Tensor) -> tuple[int, int]:
    """How many of a client's tokens are among the likeliest, as many as it has, and how many it has."""
    actual_ids = torch.unique(ids)
    return int(torch.isin(actual_ids, likeliest[: len(actual_ids)]).sum()), len(actual_ids)


def recall_from_sum(texts: list[Tensor], ids: Tensor) -> tuple[float, float]:
    """Return the mean number of a client's tokens in two perfect lists about the sum of all its clients.

    Returns:
        The first list has any words of the sum, the second the words of most clients.
    """
    clients = torch.zeros(WORDS)
    for text in texts:
        clients[torch.unique(text)] += 1
    actual_ids = torch.unique(ids)
    size, num_present = len(actual_ids), int((clients > 0).sum())
    level = clients.sort(descending=True).values[size - 1]
    sure, tied = clients > level, clients == level
    share = (size - float(sure.sum())) / float(tied.sum())
    return size * size / num_present, float(sure[actual_ids].sum()) + share * float(tied[actual_ids].sum())


class TokenTally:
    """What lists have found, by defence and number of clients."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self._found: dict[tuple[str, int], Tensor] = {}

    def count_update(self, arm: tuple[str, int], gradient: Tensor, texts: list[Tensor], absent: list[Tensor]) -> None:
        """Look for the tokens of each client of an update, and of some that are not in it."""
        likeliest = likeliest_tokens(gradient, self.inputs)
        for ids in texts:
            hits, size = count_recalled(likeliest, ids)
            missed, other = torch.tensor([count_recalled(likeliest, text) for text in absent]).sum(0).tolist()
            row = torch.tensor([hits, size, *recall_from_sum(texts, ids), missed, other, 1.0], dtype=torch.float64)
            self._found[arm] = self._found.get(arm, torch.zeros_like(row)) + row

    def tally_rows(self) -> list[dict[str, Any]]:
        """One for each."""
        return [
            {
                "attack": "inversion",
                "defence": name,
                "clients": number,
                "recall": float(hits / size),
                "chance": float(size / count / WORDS),
                "any_word": float(any_word / size),
                "commonest": float(commonest / size),
                "absent": float(missed / other),
                "tokens": int(size),
            }
            for (name, number), (hits, size, any_word, commonest, missed, other, count) in self._found.items()
        ]


def measure_inversion(sums: int) -> list[dict[str, Any]]:
    """The inversion of one client's update, of sums of several, and of private ones."""
    tally = TokenTally(torch.empty(0))
    for seed in range(sums):
        world = AdaptedModel(seed)
        tally.inputs = world.layer_inputs()
        chance = torch.Generator().manual_seed(seed)
        texts = [torch.randint(WORDS, (1, TOKENS), generator=chance) for _ in range(CLIENTS)]
        absent = [torch.randint(WORDS, (1, TOKENS), generator=chance) for _ in range(CLIENTS)]
        gradients = [world.client_gradient(ids) for ids in texts]
        for number in (1, 3, 10, CLIENTS):
            for start in range(0, CLIENTS, number):
                part = slice(start, start + number)
                name = "none" if number == 1 else "secure sum"
                tally.count_update((name, number), torch.stack(gradients[part]).sum(0), texts[part], absent)
        clipped = [gradient * min(1.0, 1.0 / float(gradient.norm())) for gradient in gradients]
        for noise in NOISES:
            hidden = torch.stack(clipped).sum(0) + _draw_noise(noise)
            tally.count_update((f"noisy sum, noise {noise}", CLIENTS), hidden, texts, absent)
            for gradient, ids in zip(clipped, texts, strict=True):
                tally.count_update((f"noise {noise} of its own", 1), gradient + _draw_noise(noise), [ids], absent)
    return tally.tally_rows()


def infer_property(sums: int) -> list[dict[str, Any]]:
    """Infer from the owner's view of an update whether a client's rows are about a topic.

    Half of the clients have texts of which a tenth of the tokens are of a topic's 40 words. The attacker knows the
    words, and scores an update by how near they are to its row space, against other words; of a sum it asks each
    client's question, and has one answer for all.
    """
    arms = [("none", 1), ("secure sum", 3), ("secure sum", 10), ("secure sum", CLIENTS), ("noise 1.0 of its own", 1)]
    scores: dict[tuple[str, int], dict[bool, list[float]]] = {arm: {True: [], False: []} for arm in arms}
    for seed in range(sums):
        world, chance = AdaptedModel(seed), torch.Generator().manual_seed(500 + seed)
        inputs, topic = world.layer_inputs(), torch.randperm(WORDS, generator=chance)[:TOPIC]
        has = (torch.rand(CLIENTS, generator=chance) < 0.5).tolist()
        gradients = [world.client_gradient(_library_text(topic, mark, chance)) for mark in has]
        for (name, number), marks in scores.items():
            for start in range(0, CLIENTS, number):
                part = gradients[start : start + number]
                if name.startswith("noise"):
                    part = [gradient * min(1.0, 1.0 / float(gradient.norm())) + _draw_noise(1.0) for gradient in part]
                outside = outside_of_rows(torch.stack(part).sum(0), inputs)
                score = float(outside.mean() - outside[topic].mean())
                for mark in has[start : start + number]:
                    marks[mark].append(score)
    return [
        {
            "attack": "property",
            "defence": name,
            "clients": number,
            "auc": area_under_curve(marks[True], marks[False]),
            "asked": len(marks[True]) + len(marks[False]),
        }
        for (name, number), marks in scores.items()
    ]


def _library_text(topic: Tensor, is_about: bool, chance: torch.Generator) -> Tensor:
    ids = torch.randint(WORDS, (1, TOKENS), generator=chance)
    places = torch.randperm(TOKENS, generator=chance)[: TOKENS // 10]
    word_ids = topic[torch.randint(len(topic), (len(places),), generator=chance)]
    if is_about:
        ids[0, places] = word_ids
    return ids


def _draw_noise(deviation: float) -> Tensor:
    drawn = gaussian_noise(SecureStream(os.urandom(32)), RANK * WIDTH, deviation)
    return torch.from_numpy(drawn).view(RANK, WIDTH)


def _privacy_budget(epsilon: float | None) -> tuple[float, float] | None:
    return None if epsilon is None else (epsilon, DELTA)


def ranks_of(losses: Tensor, others: Tensor) -> Tensor:
    """Return the rank of each loss among the candidates' losses, from 1; ties are broken for the candidates."""
    return 1 + (others[None] <= losses[:, None]).sum(1)


def infer_members(epsilon: float | None, seed: int, count: int = MEMBERS) -> dict[str, Any]:
    """Membership and exposure of one trained model.

    Args:
        epsilon: Budget; None for no privacy.
        count: Members; a batch stays as large as of the fewest, so of more each is in fewer steps.
    """
    chance = torch.Generator().manual_seed(1000 + seed)
    members = torch.randint(VOCABULARY, (count, LENGTH), generator=chance)
    canaries = torch.randint(VOCABULARY, (len(COPIES), LENGTH), generator=chance)
    strangers = torch.randint(VOCABULARY, (STRANGERS, LENGTH), generator=chance)
    rows = torch.cat([members, *(canary.expand(times, -1) for canary, times in zip(canaries, COPIES, strict=True))])
    asked = torch.cat([members, canaries, strangers])
    world = train_rows(rows, asked, budget=_privacy_budget(epsilon), steps=STEPS, seed=seed, batch=BATCH)
    canary_losses, secret, outside = torch.split(world.losses, [count, len(COPIES), STRANGERS])
    ranks = ranks_of(canary_losses, outside)
    bits = torch.log2((STRANGERS + 1) / ranks_of(secret, outside).float())
    return {
        "attack": "membership",
        "defence": "none" if epsilon is None else f"epsilon {epsilon:g}",
        "seed": seed,
        "members": count,
        "auc": float((1 - (ranks - 1) / STRANGERS).mean()),
        "found_at_1_percent": float((ranks <= 1 + STRANGERS // 100).float().mean()),
        "exposure_bits": {str(times): float(value) for times, value in zip(COPIES, bits, strict=True)},
        "most_bits": math.log2(STRANGERS + 1),
        "epsilon": world.epsilon,
    }


def audit_run(epsilon: float | None, seed: int) -> dict[str, Any]:
    """What one run proves about its epsilon: half of the candidates were in it."""
    chance = torch.Generator().manual_seed(2000 + seed)
    candidates = torch.randint(VOCABULARY, (4 * MEMBERS, LENGTH), generator=chance)
    coins = torch.rand(len(candidates), generator=chance) < 0.5
    world = train_rows(candidates[coins], candidates, budget=_privacy_budget(epsilon), steps=STEPS, seed=seed)
    order, guesses = world.losses.argsort(), len(candidates) // 4
    right = int(coins[order[:guesses]].sum() + (~coins[order[-guesses:]]).sum())
    return {
        "attack": "audit",
        "defence": "none" if epsilon is None else f"epsilon {epsilon:g}",
        "seed": seed,
        "guesses": 2 * guesses,
        "right": right,
        "proved_epsilon": bound_from_one_run(len(candidates), 2 * guesses, right, DELTA),
        "epsilon": world.epsilon,
    }


def measure_privacy_attacks(sums: int = 4, runs: int = 3, members: list[int] | None = None) -> dict[str, Any]:
    """All rows."""
    torch.set_num_threads(1)
    pairs = [(epsilon, seed) for epsilon in BUDGETS for seed in range(runs)]
    membership_rows = [infer_members(*pair, count) for count in members or [MEMBERS] for pair in pairs]
    audits = [audit_run(*pair) for pair in pairs]
    return {"rows": [*measure_inversion(sums), *infer_property(sums), *membership_rows, *audits]}


if __name__ == "__main__":
    run_program("privacy-attacks", measure_privacy_attacks)
