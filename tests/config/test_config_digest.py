"""Parties compare one digest before step 1; it depends on the values, not on how the file was written."""

import hashlib
from pathlib import Path

import pytest

from phalanx.config import StrictModel, canonical_json, digest_config, load_config


class Optimizer(StrictModel):
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)


class Run(StrictModel):
    name: str
    optimizer: Optimizer


def load(tmp_path: Path, text: str) -> Run:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, Run)


def test_the_digest_is_the_sha256_of_the_canonical_json() -> None:
    run = Run(name="ü", optimizer=Optimizer(lr=0.5))

    expected = hashlib.sha256('{"name":"ü","optimizer":{"betas":[0.9,0.95],"lr":0.5}}'.encode()).hexdigest()

    assert digest_config(run) == expected


def test_key_order_comments_and_spelled_out_defaults_do_not_change_the_digest(tmp_path: Path) -> None:
    short = load(tmp_path, 'name = "a"\noptimizer = { lr = 1 }\n')
    long = load(tmp_path, '# as above\noptimizer.betas = [0.9, 0.95]\noptimizer.lr = 1.0\nname = "a"\n')

    assert digest_config(short) == digest_config(long)


@pytest.mark.parametrize(
    "other",
    [Run(name="b", optimizer=Optimizer(lr=0.5)), Run(name="a", optimizer=Optimizer(lr=0.5000000000000001))],
)
def test_any_other_value_changes_the_digest(other: Run) -> None:
    assert digest_config(other) != digest_config(Run(name="a", optimizer=Optimizer(lr=0.5)))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_without_a_word_for_a_number_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"lr": number})
