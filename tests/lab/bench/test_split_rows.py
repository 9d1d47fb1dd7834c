"""The rows of ``phalanx bench split``: shares are of a plaintext step of the same size."""

import pytest

from phalanx.lab.bench.overhead.split import SplitArm, SplitSize, arms_of, make_split_run, split_rows

SMALL, WIDE = SplitSize(256, 4, 8, 64), SplitSize(384, 6, 6, 128)


def ran(cpu_s, cipher_s=0.0, digest="a", **more):
    parts = {"digest_s": 0.0, "framing_s": 0.0, "signing_s": 0.0, "meeting_s": 0.0, "cipher_s": cipher_s, **more}
    sizes = {"step_s": cpu_s, "bytes_per_step": 10.0, "cpu_s": cpu_s, "meetings_s": 0.5}
    return {**sizes, **parts, "final_weights_digest": digest}


def test_a_share_is_of_the_plaintext_step_of_its_own_size_and_of_nothing_where_there_is_none():
    found = {
        SplitArm("plaintext", SMALL): [ran(2.0), ran(4.0), ran(90.0)],
        SplitArm("sealed", SMALL): [ran(8.0, 0.004, signing_s=0.02, digest_s=0.016)],
        SplitArm("sealed", WIDE): [ran(8.0, 0.004)],
    }

    plain, sealed, alone = split_rows(found)

    assert (plain["crypto_share"], plain["cpu_s"]) == (0.0, 4.0)
    assert sealed["crypto_share"] == pytest.approx(0.001)
    assert sealed["security_share"] == pytest.approx(0.01)
    assert (alone["crypto_share"], alone["security_share"]) == (None, None)


def test_turns_that_end_with_other_weights_have_no_digest():
    same, other = split_rows(
        {
            SplitArm("sealed", SMALL): [ran(1.0, digest="a"), ran(1.0, digest="a")],
            SplitArm("sealed", WIDE): [ran(1.0, digest="a"), ran(1.0, digest="b")],
        }
    )

    assert (same["final_weights_digest"], other["final_weights_digest"]) == ("a", None)


@pytest.mark.parametrize("quick", [True, False])
def test_every_arm_is_a_run_that_can_be_and_has_plaintext_of_its_size_beside_it(quick):
    arms = arms_of(quick)

    for arm in arms:
        assert SplitArm("plaintext", arm.size) in arms
        assert make_split_run(arm, 4).split.mode == arm.mode
    assert len(set(arms)) == len(arms)
