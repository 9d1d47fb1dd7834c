"""What exact numerics do not cover is refused where the plan is made, by name."""

import pytest

from phalanx.errors import ConfigError
from phalanx.models import LoraConfig, open_model
from phalanx.pipeline import GuardConfig
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan


def exact(run, **train):
    return type(run)(**run.written | {"train": run.train.model_copy(update={"numerics": "exact", **train})})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    run = tiny_run()
    return open_model(run.model, tmp_path_factory.mktemp("model"), run.train.seed)


def test_a_plan_tells_every_party_the_law_and_takes_plain_attention(source):
    plan = make_plan(exact(tiny_run()), source)

    assert (plan.numerics, plan.attention) == ("exact", "eager")


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (exact(tiny_run(), precision="bf16"), "train.precision"),
        (exact(tiny_run(), device="cuda"), "train.device"),
        (exact(tiny_run(guard=GuardConfig(classes="mixed"))), "guard.classes"),
        (exact(tiny_run(adapter=LoraConfig(rank=2, dora=True))), "DoRA"),
    ],
    ids=["bf16", "cuda", "mixed", "dora"],
)
def test_what_the_law_does_not_cover_is_refused_by_name(source, run, named):
    with pytest.raises(ConfigError, match=named):
        make_plan(run, source)


def test_a_run_file_without_the_key_keeps_its_digest():
    assert "numerics" not in tiny_run().written["train"].model_dump()
    assert exact(tiny_run()).train.model_dump()["numerics"] == "exact"
