"""A bench of attacks on what training tells of its rows: each where nothing defends, and behind each defence.

``python -m phalanx.lab.bench.alone.privacy_attacks OUT.json [--sums 4] [--runs 3]``

Inversion: the span check on one step's gradient of a LoRA matrix of rank 16, 64 tokens of 2000; the share of a client's
tokens among the likeliest, as many as it has. Membership: rows of random tokens; the area under the curve of the loss,
and how many members are found where one stranger in a hundred is accused. Exposure of canaries that stand once, four
and sixteen times: log2 of candidates over the rank. Audit: coins decide which rows are in; what the guesses prove.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.lab.attacks.privacy.epsilon_bound import bound_of_one_run
from phalanx.lab.attacks.privacy.span_check import outside_of_rows
from phalanx.lab.bench.alone.private_world import LENGTH, VOCABULARY, train_rows
from phalanx.lab.bench.measure.machine import current_commit, describe_machine, load_average
from phalanx.security.privacy import SecureStream, gaussian_noise

WORDS, TOKENS, WIDTH, RANK = 2000, 64, 256, 16
CLIENTS = 30
MEMBERS, STRANGERS, STEPS, DELTA = 120, 1000, 60, 1e-4
COPIES = (1, 4, 16)
BUDGETS: tuple[float | None, ...] = (None, 8.0, 1.0)
NOISES = (0.5, 1.0)


class AdaptedModel:
    """A random Llama with a LoRA matrix pair at the first layer's values; its B has moved from zero."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes))
        for one in self.model.parameters():
            one.requires_grad = False
        self.first = nn.Parameter(torch.randn(RANK, WIDTH) / math.sqrt(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, RANK) * 0.02)
        values = self.model.model.layers[0].self_attn.v_proj
        values.register_forward_hook(lambda _, given, out: out + given[0] @ self.first.T @ self.second.T)

    def inputs(self) -> Tensor:
        """What the adapted layer is given for each token: the attacker has the model."""
        found: Tensor = self.model.model.layers[0].input_layernorm(self.model.model.embed_tokens.weight).detach()
        return found

    def gradient(self, ids: Tensor) -> Tensor:
        """The gradient of the first matrix on one client's rows."""
        loss = self.model(input_ids=ids, labels=ids).loss
        return torch.autograd.grad(loss, self.first)[0]


def recall(gradient: Tensor, inputs: Tensor, ids: Tensor) -> tuple[int, int]:
    """How many of a client's tokens are among the likeliest, and how many it has."""
    own = torch.unique(ids)
    likeliest = outside_of_rows(gradient, inputs).argsort()[: len(own)]
    return int(torch.isin(own, likeliest).sum()), len(own)


def invert(sums: int) -> list[dict[str, Any]]:
    """The inversion of one client's update, of sums of several, and of private ones."""
    found: dict[tuple[str, int], list[int]] = {}
    for seed in range(sums):
        world = AdaptedModel(seed)
        inputs = world.inputs()
        chance = torch.Generator().manual_seed(seed)
        texts = [torch.randint(WORDS, (1, TOKENS), generator=chance) for _ in range(CLIENTS)]
        gradients = [world.gradient(ids) for ids in texts]

        def count(name: str, number: int, gradient: Tensor, ids: Tensor, known: Tensor = inputs) -> None:
            for at, one in enumerate(recall(gradient, known, ids)):
                found.setdefault((name, number), [0, 0])[at] += one

        for number in (1, 3, 10, CLIENTS):
            for start in range(0, CLIENTS, number):
                total = torch.stack(gradients[start : start + number]).sum(0)
                for ids in texts[start : start + number]:
                    count("none" if number == 1 else "secure sum", number, total, ids)
        clipped = [one * min(1.0, 1.0 / float(one.norm())) for one in gradients]
        for noise in NOISES:
            hidden = torch.stack(clipped).sum(0) + _noise(noise)
            for ids in texts:
                count(f"noisy sum, noise {noise}", CLIENTS, hidden, ids)
            for gradient, ids in zip(clipped, texts, strict=True):
                count(f"noise {noise} of its own", 1, gradient + _noise(noise), ids)
    return [
        {
            "attack": "inversion",
            "defence": name,
            "clients": number,
            "recall": hits / own,
            "chance": own / (sums * CLIENTS) / WORDS,
            "tokens": own,
        }
        for (name, number), (hits, own) in found.items()
    ]


def _noise(deviation: float) -> Tensor:
    drawn = gaussian_noise(SecureStream(os.urandom(32)), RANK * WIDTH, deviation)
    return torch.from_numpy(drawn).view(RANK, WIDTH)


def ranks_of(losses: Tensor, others: Tensor) -> Tensor:
    """The rank of each loss among those of candidates, from 1; ties are broken for the candidates."""
    return 1 + (others[None] <= losses[:, None]).sum(1)


def infer_members(epsilon: float | None, seed: int) -> dict[str, Any]:
    """Membership and exposure of one trained model."""
    chance = torch.Generator().manual_seed(1000 + seed)
    members = torch.randint(VOCABULARY, (MEMBERS, LENGTH), generator=chance)
    canaries = torch.randint(VOCABULARY, (len(COPIES), LENGTH), generator=chance)
    strangers = torch.randint(VOCABULARY, (STRANGERS, LENGTH), generator=chance)
    rows = torch.cat([members, *(one.expand(times, -1) for one, times in zip(canaries, COPIES, strict=True))])
    asked = torch.cat([members, canaries, strangers])
    world = train_rows(rows, asked, epsilon=epsilon, delta=DELTA, steps=STEPS, seed=seed)
    known, secret, outside = torch.split(world.losses, [MEMBERS, len(COPIES), STRANGERS])
    ranks = ranks_of(known, outside)
    bits = torch.log2((STRANGERS + 1) / ranks_of(secret, outside).float())
    return {
        "attack": "membership",
        "defence": "none" if epsilon is None else f"epsilon {epsilon:g}",
        "seed": seed,
        "auc": float((1 - (ranks - 1) / STRANGERS).mean()),
        "found_at_1_percent": float((ranks <= 1 + STRANGERS // 100).float().mean()),
        "exposure_bits": {str(times): float(one) for times, one in zip(COPIES, bits, strict=True)},
        "most_bits": math.log2(STRANGERS + 1),
        "epsilon": world.epsilon,
    }


def audit_run(epsilon: float | None, seed: int) -> dict[str, Any]:
    """What one run proves about its epsilon: half of the candidates were in it."""
    chance = torch.Generator().manual_seed(2000 + seed)
    candidates = torch.randint(VOCABULARY, (4 * MEMBERS, LENGTH), generator=chance)
    coins = torch.rand(len(candidates), generator=chance) < 0.5
    world = train_rows(candidates[coins], candidates, epsilon=epsilon, delta=DELTA, steps=STEPS, seed=seed)
    order, guesses = world.losses.argsort(), len(candidates) // 4
    right = int(coins[order[:guesses]].sum() + (~coins[order[-guesses:]]).sum())
    return {
        "attack": "audit",
        "defence": "none" if epsilon is None else f"epsilon {epsilon:g}",
        "seed": seed,
        "guesses": 2 * guesses,
        "right": right,
        "proved_epsilon": bound_of_one_run(len(candidates), 2 * guesses, right, DELTA),
        "epsilon": world.epsilon,
    }


def measure(sums: int, runs: int) -> list[dict[str, Any]]:
    """All rows."""
    pairs = [(epsilon, seed) for epsilon in BUDGETS for seed in range(runs)]
    return [*invert(sums), *(infer_members(*one) for one in pairs), *(audit_run(*one) for one in pairs)]


def main() -> None:
    """Measure, and write a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--sums", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "name": "privacy-attacks",
        "command": f"python -m phalanx.lab.bench.alone.privacy_attacks OUT --sums {given.sums} --runs {given.runs}",
        "commit": current_commit(),
        "machine": describe_machine(),
        "load": load_average(),
        "rows": measure(given.sums, given.runs),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
