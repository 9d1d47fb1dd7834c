"""A bench of the gradient screen: how often it doubts honest weight gradients, and how often it passes gross lies.

``python -m phalanx.lab.bench.alone.gradient_screen OUT.json [--steps 200]``

Each row is one small GPT-2 that trains on random tokens or on the bytes of Python's standard library. In every step the
weight gradient of its middle layers is compared with that of one microbatch, as a shadow compares drawn tensors: as is,
reversed, ten times as large, and with the largest hundredth of each tensor reversed. A doubt has no consequences here,
so each step counts once for each of the four.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.lab.bench.measure.harness import run_program
from phalanx.lab.bench.measure.workloads import standard_library
from phalanx.pipeline.tolerance.screen import doubt_about, draw_tensors

LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient_sign": lambda g: -g,
    "gradient_scale": lambda g: 10 * g,
    "gradient_topk": lambda g: _largest_reversed(g, 0.01),
    "zero": torch.zeros_like,
    "scale 1.01": lambda g: 1.01 * g,
}


_DRAWS = 4
"""Draws of tensors for each gradient and claim; small models have all their tensors in each."""


@dataclass(frozen=True)
class ScreenCase:
    """One training run: its model, its data and its microbatches."""

    width: int
    layers: int
    sequence: int
    batch: int
    microbatches: int
    lr: float
    is_text: bool


CASES = (
    ScreenCase(16, 4, 8, 8, 4, 1e-2, False),
    ScreenCase(32, 6, 16, 16, 8, 1e-2, False),
    ScreenCase(32, 6, 16, 16, 8, 3e-3, True),
    ScreenCase(64, 4, 32, 64, 64, 1e-3, True),
    ScreenCase(288, 4, 128, 32, 8, 1e-3, True),
)


def measure_screen(case: ScreenCase, steps: int, text: Tensor) -> dict[str, object]:
    """Train, and compare every step's sum with one of its microbatches."""
    torch.manual_seed(0)
    sizes = {"n_positions": case.sequence, "n_embd": case.width, "n_layer": case.layers}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_head=max(2, case.width // 32), **sizes, **dropout, **tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)
    middle = {
        name: p for name, p in model.named_parameters() if any(f".h.{n}." in name for n in range(1, case.layers - 1))
    }
    sizes = {name: p.numel() for name, p in middle.items()}
    doubts: dict[str, Counter[str]] = {name: Counter() for name in ("none", *LIES)}
    for step in range(steps):
        ids = _draw_batch(case, text)
        sample_gradients, total = _weight_gradients(model, middle, ids, case.microbatches, step % case.microbatches)
        claims = {"none": total, **{name: {k: lie(g) for k, g in total.items()} for name, lie in LIES.items()}}
        for name, claimed in claims.items():
            for _ in range(_DRAWS):
                sampled = {drawn: sample_gradients[drawn] for drawn in draw_tensors(sizes)}
                doubts[name][doubt_about(claimed, sampled, case.microbatches) or "no"] += 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {
        **case.__dict__,
        "numbers": sum(p.numel() for p in middle.values()),
        "steps": steps,
        "doubted": {name: 1 - counts["no"] / (_DRAWS * steps) for name, counts in doubts.items()},
        "doubts": {name: dict(counts) for name, counts in doubts.items()},
    }


def _weight_gradients(
    model: GPT2LMHeadModel, middle: dict[str, Tensor], ids: Tensor, microbatches: int, drawn: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    gradients: dict[str, Tensor] = {}
    model.zero_grad()
    for number, part in enumerate(ids.chunk(microbatches)):
        loss = model(part, labels=part).loss / microbatches
        if number == drawn:
            gradients = dict(
                zip(middle, torch.autograd.grad(loss, list(middle.values()), retain_graph=True), strict=True)
            )
        loss.backward()
    return gradients, {name: p.grad.clone() for name, p in middle.items() if p.grad is not None}


def _draw_batch(case: ScreenCase, text: Tensor) -> Tensor:
    if not case.is_text:
        return torch.randint(0, 64, (case.batch, case.sequence))
    starts = torch.randint(0, len(text) - case.sequence, (case.batch,))
    return torch.stack([text[start : start + case.sequence] for start in starts])


def _largest_reversed(gradient: Tensor, share: float) -> Tensor:
    flat = gradient.flatten().clone()
    places = torch.topk(flat.abs(), max(1, round(share * len(flat)))).indices
    flat[places] = -flat[places]
    return flat.view_as(gradient)


def measure_all(steps: int = 200) -> dict[str, list[dict[str, object]]]:
    """Measure every case; the largest has a quarter of the steps."""
    torch.set_num_threads(1)
    text = standard_library()
    return {"rows": [measure_screen(case, steps if case.width < 200 else steps // 4, text) for case in CASES]}


if __name__ == "__main__":
    run_program("gradient-screen", measure_all)
