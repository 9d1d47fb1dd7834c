"""GRPO, Dr. GRPO and RLOO against TRL 1.16: advantages, loss and every gradient of one batch that TRL sampled."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.objectives import IGNORE, OBJECTIVES
from phalanx.objectives.advantages import group_advantages, leave_one_out_advantages
from phalanx.objectives.policy_gradient import ADVANTAGES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS, token_log_probs

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "trl_policy_gradient.py"
RESULT = ROOT / "benchmarks" / "results" / "trl-policy-gradient.json"
PEER = Path(os.environ.get("PHALANX_TRL_PYTHON", "/nowhere/bin/python"))
"""Python of an environment with TRL 1.16."""
TOLERANCE = 1e-5
LONGEST = 6


def seeded(model, seed, spread):
    """As the program has it."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(seed * 1000 + number)
        parameter.data += spread * torch.randn(parameter.shape, generator=draw)


def rows_of(batch):
    """TRL's padded halves as rows without padding in front: ids, labels, and where a completion's numbers belong."""
    ids, labels, places = [], [], []
    for prompt, seen, answer, written in zip(
        batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], batch["completion_mask"], strict=True
    ):
        head = [token for token, kept in zip(prompt, seen, strict=True) if kept]
        tail = [token for token, kept in zip(answer, written, strict=True) if kept]
        row = head + tail
        ids.append(row[:-1] + [0] * (16 - len(row) + 1))
        labels.append([IGNORE] * (len(head) - 1) + tail + [IGNORE] * (16 - len(row) + 1))
        places.append((len(head) - 1, len(tail)))
    return torch.tensor(ids), torch.tensor(labels), places


def spread(values, places):
    """Numbers of completions at the places of their labels; a number for a row at all of its places."""
    rows = torch.full((len(places), 16), float("nan"))
    for row, (at, size), found in zip(rows, places, values, strict=True):
        row[at : at + size] = torch.tensor(found[:size] if isinstance(found, list) else [found] * size)
    return rows


def check(result, name):
    case, options = result["cases"][name], result["cases"][name]["options"]
    batch = case["batch"]
    ids, labels, places = rows_of(batch)
    model = LlamaForCausalLM(LlamaConfig(**result["architecture"]))
    for parameter in model.parameters():
        parameter.data.zero_()
    seeded(model, 1, 0.5)
    temperature = options["temperature"]
    with torch.no_grad():
        old = token_log_probs(name, model(ids).logits, labels, temperature)
    reference = old
    if options["beta"]:
        seeded(model, 3, 0.05)
        with torch.no_grad():
            reference = token_log_probs(name, model(ids).logits, labels, temperature)
        for parameter in model.parameters():
            parameter.data.zero_()
        seeded(model, 1, 0.5)
    seeded(model, 2, 0.05)

    rewards = torch.tensor(case["rewards"])
    if name == "rloo":
        rewards = rewards - options["beta"] * (old - reference).sum(dim=1)
        advantages = leave_one_out_advantages(rewards.view(-1, 4)).flatten()
    else:
        advantages = group_advantages(rewards.view(-1, 4), scaled=name == "grpo").flatten()
    torch.testing.assert_close(advantages, torch.tensor(batch["advantages"]), rtol=TOLERANCE, atol=TOLERANCE)

    kl = 0.0 if name == "rloo" else options["beta"]
    settings = OBJECTIVES[name].settings(kind=name, kl=kl, temperature=temperature, max_new_tokens=LONGEST)
    extras = {
        ADVANTAGES: spread(batch["advantages"], places),
        OLD_LOG_PROBS: old,
        REFERENCE_LOG_PROBS: reference,
    }
    total, rows = OBJECTIVES[name].with_settings(settings)(model(ids).logits, labels, extras)
    (total / rows).backward()

    assert float(total.detach() / rows) == pytest.approx(case["loss"], rel=TOLERANCE, abs=TOLERANCE)
    for parameter, tensor in model.named_parameters():
        expected = torch.tensor(case["gradients"][parameter])
        torch.testing.assert_close(tensor.grad, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=parameter)
    ratios = (token_log_probs(name, model(ids).logits, labels, temperature) - old).exp().detach()
    return ratios


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_loss_and_gradients_are_those_of_trl(name):
    result = json.loads(RESULT.read_text())

    ratios = check(result, name)

    assert result["versions"]["trl"] == "1.16.0"
    # the batch is one in which the clip decides
    assert bool((ratios > 1.2).any())
    assert bool((ratios < 0.8).any())


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL 1.16 in an environment of its own, PHALANX_TRL_PYTHON")
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_trl_says_the_same_when_it_is_asked_again(name):
    said = subprocess.run([str(PEER), str(PROGRAM)], check=True, capture_output=True, text=True, timeout=600)

    check(json.loads(said.stdout), name)
