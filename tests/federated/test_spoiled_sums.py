"""A site that spoils a masked sum is named where its signature shows it, and ends no run in any case."""

from collections.abc import Callable

import pytest
import torch
from rounds_scene import Parabola, Scene
from site_acts import LENGTH, WORDS, View, signed_words
from site_adversary import AdversaryScene, adopt, schedules

from phalanx.errors import FailedRoundError
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import CarriedReply, SentOrder
from phalanx.federated.rounds.summing import bucket_sites
from phalanx.security.crypto import digest_hex

HONEST = [f"site-{number}" for number in range(4)]


def attacked(home, act: str, always: bool = False) -> AdversaryScene:
    """A scene in which the last site does one act of the adversary's list."""
    how = "always" if always else "once"
    (schedule,) = [one for one in schedules("masked", home / "sample") if str(one).endswith(f"{act}/late/{how}")]
    scene = AdversaryScene(home / "scene", "masked")
    scene.adversary.schedule = schedule
    return scene


def mean_of(scene: AdversaryScene, sites, weights=None) -> torch.Tensor:
    weights = torch.zeros(LENGTH) if weights is None else weights
    return weights + torch.stack([scene.update_of(site, weights) for site in sites]).mean(0)


def test_a_site_that_deals_another_seed_than_it_announced_costs_one_round_and_is_shut_out(tmp_path):
    scene = attacked(tmp_path, "seed_digest altered in all")

    lost = scene.owner.run_round(1, 0.5)
    record = scene.owner.run_round(2, 0.5)

    assert "site-4: dealt shares of another secret than it said" in lost.lost
    assert not lost.shares and lost.left_out["site-0"] == "the sum was lost"
    assert scene.owner.excluded_sites == {"site-4": "spoiled a sum: bad_share"}
    assert sorted(record.shares) == HONEST and not record.lost
    torch.testing.assert_close(scene.w, mean_of(scene, HONEST), atol=1e-5, rtol=1e-5)


def test_masks_that_are_not_a_sites_own_cost_a_round_and_nobody_is_accused(tmp_path):
    scene = attacked(tmp_path, "mask_key other in all", always=True)

    with pytest.raises(FailedRoundError, match="a client's masks are not its own"):
        scene.owner.run_round(1, 0.5)
    lost = scene.owner.run_round(1, 0.5)
    scene.adversary.schedule = None
    record = scene.owner.run_round(2, 0.5)

    assert "a client's masks are not its own" in lost.lost and scene.owner.excluded_sites == {}
    assert len(record.shares) == 5
    torch.testing.assert_close(scene.w, mean_of(scene, [*HONEST, "site-4"]), atol=1e-5, rtol=1e-5)


def test_values_beyond_the_clip_are_no_sum(tmp_path):
    scene = attacked(tmp_path, "masked values all", always=True)

    with pytest.raises(FailedRoundError, match=r"impossible weight|maximum of clipped updates"):
        scene.owner.run_round(1, 0.5)
    assert scene.owner.run_round(1, 0.5).lost and not scene.w.any()


def test_three_lost_rounds_in_a_row_end_the_session_with_those_that_were_in_all_of_them(tmp_path):
    scene = attacked(tmp_path, "masked values all", always=True)
    for number in (1, 2, 3):
        with pytest.raises(FailedRoundError):
            scene.owner.run_round(number, 0.5)
        assert scene.owner.run_round(number, 0.5).lost

    with pytest.raises(FailedRoundError):
        scene.owner.run_round(4, 0.5)
    with pytest.raises(
        FailedRoundError, match=r"3 rounds in a row before it were lost.*sites in all of their sums: .*site-4"
    ):
        scene.owner.run_round(4, 0.5)
    scene.adversary.schedule = None
    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(3)
    assert len(scene.owner.run_round(4, 0.5).shares) == 5


def test_boxes_that_open_nowhere_name_their_dealer_and_the_round_is_made_without_it(tmp_path):
    scene = attacked(tmp_path, "box-signature.sealed zeros in all", always=True)

    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 0.5)
    record = scene.owner.run_round(1, 0.5)

    assert scene.owner.excluded_sites == {"site-4": "spoiled a sum: 4 sites refused what it had signed for them"}
    assert sorted(record.shares) == HONEST
    torch.testing.assert_close(scene.w, mean_of(scene, HONEST), atol=1e-5, rtol=1e-5)


def test_a_box_that_one_site_cannot_open_costs_that_site_one_round(tmp_path):
    scene = attacked(tmp_path, "box-signature.sealed zeros in first")

    record = scene.owner.run_round(1, 0.5)

    assert record.left_out == {"site-0": "refused"} and scene.owner.excluded_sites == {}
    assert len(scene.owner.run_round(2, 0.5).shares) == 5


@pytest.mark.parametrize("sites", [3, 4])
def test_a_site_that_blames_another_one_shuts_it_out_in_no_cohort(tmp_path, sites):
    trainers = [Parabola(torch.full((2,), float(number))) for number in range(sites)]
    scene = Scene(tmp_path, trainers, secure=True, min_cohort=3, max_norm=20.0)
    honest = scene.carrier.sites["site-2"]
    scene.carrier.sites["site-2"] = lambda order, payload: (
        (m.SiteFault(ticket=order.ticket, reason="refused", culprit="site-0"), b"")
        if getattr(order, "phase", "") == "mask"
        else honest(order, payload)
    )

    for _ in range(3):
        try:
            scene.owner.run_round(1, 0.5)
        except FailedRoundError:
            continue
        break

    assert scene.owner.excluded_sites == {}


def bucket_scene(home, sites: int, byzantine: int) -> Scene:
    trainers = [Parabola(torch.tensor([1.0, 1.0 + number / 10])) for number in range(sites)]
    rule = {"aggregator": "median", "byzantine": byzantine}
    return Scene(home, trainers, secure=True, min_cohort=3, max_norm=20.0, bucket=3, **rule)


def answer_fault(scene: Scene, name: str, phase: str, culprit: str = "") -> None:
    """Have a site answer one phase of every sum by a fault, which blames another site."""
    honest = scene.carrier.sites[name]
    scene.carrier.sites[name] = lambda order, payload: (
        (m.SiteFault(ticket=order.ticket, reason="refused", culprit=culprit), b"")
        if getattr(order, "phase", "") == phase
        else honest(order, payload)
    )


def test_as_many_sites_as_may_lie_shut_nobody_out_of_whose_bucket_they_are_the_rest(tmp_path):
    scene = bucket_scene(tmp_path, 15, 2)
    model = digest_hex(scene.owner._weights_payload())
    accused, *liars = bucket_sites(list(scene.trainers), 3, bytes.fromhex(model))[0]
    for liar in liars:
        answer_fault(scene, liar, "mask", accused)

    with pytest.raises(FailedRoundError, match="4 buckets: median tolerates at most 1"):
        scene.owner.run_round(1, 1.0)

    assert scene.owner.excluded_sites == {}


@pytest.mark.parametrize("phase", ["join", "mask", "release"])
def test_a_rule_over_buckets_goes_on_without_the_bucket_that_a_site_has_left(tmp_path, phase):
    scene = bucket_scene(tmp_path, 12, 1)
    answer_fault(scene, "site-11", phase)

    record = scene.owner.run_round(1, 1.0)

    assert len(record.shares) == 9 and "site-11" not in record.shares and not record.lost
    assert 0.9 < scene.w[0] < 1.1


def test_a_bucket_that_a_site_has_left_does_not_count_as_the_one_of_a_liar(tmp_path):
    # of two buckets that are left, the rule stands no liar
    scene = bucket_scene(tmp_path, 9, 1)
    answer_fault(scene, "site-8", "mask")

    with pytest.raises(FailedRoundError, match="2 buckets: median tolerates at most 0 spoiled buckets, but 1 sites"):
        scene.owner.run_round(1, 1.0)


def test_a_rule_over_buckets_goes_on_without_the_bucket_that_was_spoiled(tmp_path):
    trainers = [Parabola(torch.tensor([1.0, 1.0 + number / 10])) for number in range(9)]
    scene = Scene(
        tmp_path, trainers, secure=True, min_cohort=3, max_norm=20.0, bucket=3, aggregator="median", byzantine=1
    )
    honest = scene.carrier.sites["site-8"]
    scene.carrier.sites["site-8"] = lambda order, payload: _with_other_words(honest, order, payload)

    record = scene.owner.run_round(1, 1.0)

    spoiled = [site for site, why in record.left_out.items() if why == "its sum was spoiled"]
    assert "site-8" in spoiled and len(spoiled) == 3 and len(record.shares) == 6
    assert 0.9 < scene.w[0] < 1.1


def _with_other_words(honest: Callable, order, payload):
    reply, data = honest(order, payload)
    if getattr(order, "phase", "") != "mask":
        return reply, data
    own = CarriedReply("site-8", reply.kind, reply.model_dump(mode="json"), bytes(data))
    lie = signed_words(View(SentOrder(order), own, own, None), "site-8", WORDS["all"])
    adopt(honest.__self__, "mask", lie)
    return m.SumReply(ticket=order.ticket, message=lie.body["message"]), lie.payload
