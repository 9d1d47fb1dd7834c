"""Preferences against TRL 1.16: loss and every gradient of one batch, from its committed numbers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from phalanx.objectives import IGNORE, OBJECTIVES, objective_of
from phalanx.objectives.pairs import row_log_probs

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "trl-preferences.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5
SETTINGS = {
    **{kind: {"beta": 0.1} for kind in ("dpo", "ipo", "kto", "cpo", "orpo")},
    "simpo": {"beta": 2.0, "margin": 1.0},
}


def seeded(model, seed=1000):
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(seed + number)
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=draw)
    return model.eval()


def reference():
    model = seeded(LlamaForCausalLM(LlamaConfig(**FOUND["architecture"])))
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(5000 + number)
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def shifted(ids, counts):
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = torch.where(counts[:, 1:].bool(), ids[:, 1:], IGNORE)
    return labels


def interleaved(first, second):
    """Rows of two tables as pairs, the narrower one padded behind."""
    width = max(first.shape[1], second.shape[1])
    wide = [torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in (first, second)]
    return torch.stack(wide, dim=1).flatten(0, 1)


def rows_of(kind, batch):
    """Ids and labels as pairs of neighbours."""
    tensors = {name: torch.tensor(rows) for name, rows in batch.items()}
    if kind == "kto":
        sides = [(tensors[f"{p}input_ids"], tensors[f"{p}completion_mask"]) for p in ("", "KL_")]
    elif kind in ("simpo", "cpo", "orpo"):
        sides = [
            (tensors[f"{side}_input_ids"], (tensors[f"{side}_labels"] != IGNORE).long())
            for side in ("chosen", "rejected")
        ]
    else:
        masks = tensors.get("completion_mask", tensors["attention_mask"])
        sides = list(zip(tensors["input_ids"].chunk(2), masks.chunk(2), strict=True))
    ids, counts = (interleaved(sides[0][at], sides[1][at]) for at in (0, 1))
    return ids, shifted(ids, counts)


@pytest.mark.parametrize("kind", FOUND["kinds"])
def test_loss_and_gradients_are_those_of_trl_on_one_batch(kind):
    found = FOUND["kinds"][kind]
    ids, labels = rows_of(kind, found["batch"])
    config = LlamaConfig(**FOUND["architecture"], **({"num_labels": 1} if kind == "reward" else {}))
    model = seeded((LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config))
    with torch.no_grad():
        known = row_log_probs(kind, reference()(ids).logits, labels).total
    rows = {"reference": known}
    if kind == "kto":
        rows["wanted"] = torch.tensor(found["batch"]["label"]).long().repeat_interleave(2)
    if kind == "reward":
        rows["margin"] = torch.tensor(found["batch"]["margin"]).repeat_interleave(2)
    objective = OBJECTIVES[kind]
    chosen = objective_of(kind if objective.settings is None else objective.settings(**SETTINGS[kind]))

    logits = model.score(model.model(ids)[0]) if kind == "reward" else model(ids).logits
    total, pairs = chosen(logits, labels, {name: rows[name] for name in objective.extras})
    (total / pairs).backward()

    assert float(total.detach()) / pairs == pytest.approx(found["loss"], rel=TOLERANCE)
    for name, parameter in model.named_parameters():
        expected = torch.tensor(found["gradients"][name])
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected, rtol=TOLERANCE, atol=TOLERANCE * max(scale, 1.0))
