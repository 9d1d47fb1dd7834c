"""A masked split: the enclave's frozen layers are multiplied elsewhere, and training is what it was up to rounding."""

import pytest
from pydantic import ValidationError
from split_scene import make_scene, same, train

from phalanx.split import SplitConfig, SplitSimulator
from phalanx.split.masked import MaskedConfig, MaskedLinear


def test_a_masked_split_trains_as_a_sealed_one_up_to_fixed_point(source):
    masked, sealed = SplitSimulator(make_scene(source, "masked")), SplitSimulator(make_scene(source))

    losses, exact = ([loss for loss, _ in train(one, 4)] for one in (masked, sealed))

    assert losses == pytest.approx(exact, rel=1e-3)
    assert losses != exact
    replaced = [one for one in masked.enclave.trainer.back.modules() if isinstance(one, MaskedLinear)]
    assert len(replaced) > 4


def test_pads_are_new_each_time_and_the_bits_of_a_run_are_the_same(source):
    first, second = SplitSimulator(make_scene(source, "masked")), SplitSimulator(make_scene(source, "masked"))

    assert train(first, 3) == train(second, 3)
    assert same(first.adapters(), second.adapters())


def test_settings_of_pads_are_for_masked_splits():
    with pytest.raises(ValidationError, match=r"\[split.masked\] is for mode"):
        SplitConfig(cut=2, allow_insecure_sim=True, masked=MaskedConfig(reserve=4))


def test_a_second_worker_is_a_party_of_its_own():
    one = SplitConfig(cut=2, mode="masked", allow_insecure_sim=True)
    two = SplitConfig(cut=2, mode="masked", allow_insecure_sim=True, masked=MaskedConfig(second_worker=True))

    assert (one.masked_workers, two.masked_workers) == (("accelerator",), ("accelerator", "pad-maker"))
