"""What a federated run says of its privacy before it trains: the noise that will be drawn beside the largest update."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.terms import noisy_rounds
from phalanx.train import describe_run, load_run
from phalanx.train.setup.privacy_outlook import rows_outlook, sums_outlook
from seeded_entropy import seed_noise
from tiny_run_file import tiny_run_file

DELTA = 1e-3
ADAPTER = '[model.adapter]\nkind = "lora"\nrank = 2\n'


def section(sites, **more):
    privacy = {"epsilon": 8.0, "delta": DELTA, **more.pop("privacy", {})}
    fields = {"sites": [f"s{n}" for n in range(sites)], "secure": True, "min_cohort": 3, "max_norm": 10.0}
    return FederatedConfig.model_validate_json(json.dumps(fields | {"privacy": privacy} | more))


@pytest.mark.quick_cases("3-3")
@pytest.mark.parametrize(("sites", "cohort"), [(3, 3), (5, 4)])
def test_the_ratio_is_that_of_the_noise_that_sites_draw(sites, cohort, monkeypatch):
    seed_noise(monkeypatch, 3)
    config, length = section(sites, min_cohort=cohort), 4000
    plan = noisy_rounds(config, 4, length).noisy_sum(sites)
    drawn = sum(plan.draw_noise() for _ in range(sites)) / plan.ring_encoding.max_level * config.max_norm / sites

    outlook = sums_outlook(config, 4, length)

    assert outlook.ratio == pytest.approx(float(np.linalg.norm(drawn)) / config.max_norm, rel=0.05)
    assert outlook.paid_rounds == outlook.rounds == 4


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 100.0])
def test_the_bound_changes_no_ratio_and_more_sites_and_fewer_values_lower_it(max_norm):
    plain = sums_outlook(section(5, min_cohort=4), 4, 10_000).ratio

    assert sums_outlook(section(5, min_cohort=4, max_norm=max_norm), 4, 10_000).ratio == plain
    assert sums_outlook(section(40, min_cohort=27), 4, 10_000).ratio < plain
    assert sums_outlook(section(5, min_cohort=4), 4, 100).ratio < plain


def test_rounds_that_the_budget_does_not_pay_for_are_said():
    config = section(5, min_cohort=4, privacy={"noise_multiplier": 0.5})

    outlook = sums_outlook(config, 100, 60)

    assert outlook.paid_rounds < 100
    assert f"the budget allows {outlook.paid_rounds} of 100 rounds" in "\n".join(outlook.describe_budget())


def test_a_ratio_above_one_warns_and_one_below_does_not():
    assert sums_outlook(section(3), 4, 60_000).noise_warning().startswith("WARNING: privacy: the noise of a round is ")
    calm = sums_outlook(section(300, min_cohort=201, privacy={"epsilon": 900.0}), 1, 4)
    assert calm.ratio <= 1 and calm.noise_warning() is None


def test_sums_without_noise_have_no_outlook():
    plain = FederatedConfig.model_validate_json(json.dumps({"sites": ["a", "b"]}))

    assert sums_outlook(plain, 4, 100) is None


def run_with(tmp_path, sections, *overrides, width=200):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = f'{{ kind = "file", path = "{tmp_path / "tokenizer.json"}" }}'
    path = tmp_path / "run.toml"
    path.write_text(tiny_run_file(sections, steps=4).replace('{ kind = "bpe", vocab_size = 300 }', file))
    return load_run(path, overrides)


ROUNDS = '[federated]\nsites = ["north", "south", "west"]\nmin_cohort = 3\nlocal_steps = 2\n'
SUMS = f"{ROUNDS}secure = true\nmax_norm = 10.0\n[federated.privacy]\nepsilon = 8.0\ndelta = 1e-3\n"
ROWS = f"{ROUNDS}[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n"


@pytest.mark.quick_cases("*-60")
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("sections", "whose"), [(SUMS, "all data of one site"), (ADAPTER + ROWS, "one training row of a site")]
)
def test_the_dry_run_says_what_is_protected_the_ratio_and_the_rounds_paid_for(tmp_path, sections, whose, width):
    if "[privacy]" in sections:
        pytest.importorskip("opacus", reason="needs the extra `dp`")
    text = io.StringIO()

    Console(file=text, width=width).print(describe_run(run_with(tmp_path, sections), tmp_path / "run"))

    told = " ".join(text.getvalue().split())
    assert f"privacy: protects {whose}" in told
    assert "the budget allows 4 of 4 rounds" in told
    assert "privacy: noise relative to the largest update: ratio " in told
    assert ("WARNING: privacy" in told) is (sections == SUMS)
    assert all(len(line) <= width for line in text.getvalue().splitlines())
    # names of sites are whole at every width
    assert "north, south, west" in told and "…" not in told


def test_a_run_without_noise_says_nothing_of_privacy(tmp_path):
    text = io.StringIO()

    Console(file=text, width=120).print(describe_run(run_with(tmp_path, ROUNDS), tmp_path / "run"))

    assert "privacy:" not in text.getvalue()


def test_the_ratio_of_private_rows_is_that_of_the_mean_of_all_sites_and_steps(tmp_path):
    pytest.importorskip("opacus", reason="needs the extra `dp`")
    run = run_with(tmp_path, ADAPTER + ROWS, "privacy.noise_multiplier=2.0")
    length, generator = 5000, torch.Generator().manual_seed(1)
    steps, sites, rows = 2, 3, run.train.batch_size
    noise = sum(torch.randn(length, generator=generator) * 2.0 * 0.5 / rows for _ in range(steps) for _ in range(sites))

    outlook = rows_outlook(run, run.privacy, 64, length)

    # the largest sum of a site's mean gradients is clip_norm a step
    assert outlook.ratio == pytest.approx(float(noise.norm()) / sites / (0.5 * steps), rel=0.05)
    assert outlook.largest == "each gradient at privacy.clip_norm = 0.5"
    assert math.isfinite(outlook.ratio)
