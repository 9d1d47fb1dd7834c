"""Supervised fine-tuning against TRL 1.16: tokens, targets, loss and every gradient of one batch of conversations."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from made_chat import END, byte_tokenizer
from phalanx.data.chat import ChatEncoder, ChatTemplate, parse_conversation
from phalanx.data.packing import BestFitRows, TokenSplit
from phalanx.models import ModelSource, StageSpec, build_stage, with_marks
from phalanx.objectives import IGNORE, OBJECTIVES

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "trl_sft.py"
RESULT = ROOT / "benchmarks" / "results" / "trl-sft.json"
PEER = Path(os.environ.get("PHALANX_TRL_PYTHON", "/nowhere/bin/python"))
"""Python of an environment with TRL 1.16."""
TOLERANCE = 1e-5


def encoded(result):
    """The conversations by this package's renderer."""
    template = ChatTemplate("peer", result["template"], {"eos_token": END})
    with ChatEncoder(template, byte_tokenizer()) as encoder:
        return [encoder.encode_conversation(parse_conversation({"messages": one})) for one in result["conversations"]]


def seeded_model(result, home):
    """The program's model, cut as one stage."""
    model = LlamaForCausalLM(LlamaConfig(**result["architecture"]))
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(1000 + number)
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(home)
    source = ModelSource(home)
    spec = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    stage.attends = "documents"
    return stage


def rows_of(talks, length, *, packed):
    """Rows as a run makes them."""
    starts = np.cumsum([0, *(len(one.ids) for one in talks)])
    tokens, weights = (np.concatenate([getattr(one, name) for one in talks]) for name in ("ids", "weights"))
    split = TokenSplit(tokens.astype("<u2"), 256, lambda: starts, lambda _: None, weights)
    rows = BestFitRows(split, length, alone=not packed)
    return rows.read_rows(range(rows.num_rows))


def check(result, home, *, packed):
    talks = encoded(result)
    batch = result["batch"]
    for one, ids, labels, seen in zip(talks, batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        size = sum(seen)
        assert one.ids.tolist() == ids[:size]
        # theirs are not shifted
        assert one.target_labels.tolist() == [*labels[1:size], IGNORE]
    block = rows_of(talks, 128 if packed else len(batch["input_ids"][0]), packed=packed)
    assert len(block.ids) == (2 if packed else len(talks))
    stage = seeded_model(result, home)

    logits = stage(with_marks(torch.from_numpy(block.ids), {"documents": torch.from_numpy(block.documents)}))
    total, targets = OBJECTIVES["causal_lm"](logits, torch.from_numpy(block.labels))
    (total / targets).backward()

    assert abs(float(total.detach()) / targets - result["loss"]) < TOLERANCE
    found = {name: parameter.grad for name, parameter in stage.all_parameters().items()}
    assert found.keys() == result["gradients"].keys()
    for name, gradient in found.items():
        assert float((gradient - torch.tensor(result["gradients"][name])).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("packed", [False, True], ids=["a row each", "packed"])
def test_tokens_loss_and_gradient_are_those_that_trl_had(tmp_path, packed):
    check(json.loads(RESULT.read_text()), tmp_path, packed=packed)


def test_without_borders_between_them_packed_conversations_are_others(tmp_path):
    result = json.loads(RESULT.read_text())
    block, stage = rows_of(encoded(result), 128, packed=True), seeded_model(result, tmp_path)

    across = with_marks(torch.from_numpy(block.ids), {"documents": torch.zeros_like(torch.from_numpy(block.documents))})
    total, targets = OBJECTIVES["causal_lm"](stage(across), torch.from_numpy(block.labels))

    assert abs(float(total.detach()) / targets - result["loss"]) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="PHALANX_TRL_PYTHON names no Python with TRL 1.16")
def test_tokens_loss_and_gradient_are_those_of_trl_here(tmp_path):
    said = subprocess.run([PEER, PROGRAM], check=True, capture_output=True, text=True)

    check(json.loads(said.stdout), tmp_path, packed=False)
