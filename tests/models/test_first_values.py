"""First values depend on a seed and a name, and not on the instructions of a processor."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from phalanx.models.adapters.prefix import draw_prefix
from phalanx.models.adapters.prompt import PROMPT_TABLE, draw_prompt
from phalanx.models.seeding import NormalDraws, draw_score

LEVELS = ("default", "avx2", "avx512")
HELD = "c5968bf795edc20cc5d3a2503844f3fb83bb28a2ca80d981784fe3c262136016"


def first_values() -> str:
    """The digest of everything here that is drawn from a normal distribution."""
    score, prefix, prompt = torch.zeros(1, 768), torch.zeros(2, 4, 64), torch.zeros(8, 96)
    draw_score("score.weight", score, 7)
    draw_prefix("model.layers.0.prefix.key", prefix, 7)
    draw_prompt(PROMPT_TABLE, prompt, 7)
    torch.manual_seed(7)
    with NormalDraws():
        layer = torch.empty(40, 50)
        torch.nn.init.normal_(layer, mean=0.5, std=0.02)
        cut = torch.nn.init.trunc_normal_(torch.empty(40, 50), std=0.02, a=-0.04, b=0.04)
        parts = (score, prefix, prompt, layer, cut)
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def test_first_values_have_the_bits_that_are_held():
    assert first_values() == HELD


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_first_values_are_those_of_every_instruction_set(level):
    """Red before: `normal_` draws other bits without vectors than with them, from 16 numbers on."""
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "ATEN_CPU_CAPABILITY": level, "MKL_CBWR": "COMPATIBLE" if level == "default" else "AUTO"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout == HELD


def test_first_values_are_normal():
    weight = torch.zeros(400, 500)

    draw_score("score.weight", weight, 3)

    assert abs(float(weight.mean())) < 2e-4
    assert float(weight.std()) == pytest.approx(0.02, rel=0.01)
    assert 0.08 < float(weight.abs().max()) < 0.12


def test_the_mode_leaves_other_draws_and_the_meta_device_alone():
    torch.manual_seed(3)
    expected = torch.rand(20)
    torch.manual_seed(3)
    with NormalDraws():
        uniform = torch.rand(20)
        absent = torch.empty(4, device="meta").normal_()

    assert torch.equal(uniform, expected)
    assert absent.is_meta


if __name__ == "__main__":
    sys.stdout.write(first_values())
