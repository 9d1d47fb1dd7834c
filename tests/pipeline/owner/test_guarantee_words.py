"""What a terminal says of guarantees is plain words, with the name that `phalanx explain` knows behind them."""

import pytest

from phalanx.pipeline.owner.guarantees import GUARANTEES, describe_guarantees


def test_stages_that_are_checked_alike_are_said_together():
    said = describe_guarantees({0: "own", 1: "bit-equal", 2: "bit-equal", 3: "owner-shadowed"})

    assert said == (
        "stage 0: served by the owner (own); stages 1, 2: compared bit for bit with a second copy (bit-equal); "
        "stage 3: compared bit for bit with the owner's copy (owner-shadowed)"
    )


@pytest.mark.parametrize("name", GUARANTEES)
def test_every_guarantee_has_words(name):
    words = describe_guarantees({1: name})

    assert words.endswith(f" ({name})") and len(words) > len(f"stage 1:  ({name})") + 8
