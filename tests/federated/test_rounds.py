"""A round moves the model once, by updates of its own sites, though sites are late, gone, killed or lie."""

import json
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from rounds_scene import IDENTITIES, Parabola, Scene, parabolas

from phalanx.errors import FailedRoundError
from phalanx.federated.admission import UpdateHeader, sign_update
from phalanx.federated.carriers import messages as m
from phalanx.federated.rounds.fleet import SiteAnswer

FIVE = ([1.0, 0.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0])


def mean_of(*numbers: int) -> torch.Tensor:
    return torch.tensor([FIVE[number] for number in numbers]).mean(0)


def test_a_site_that_hangs_is_dropped_and_its_late_update_counts_nowhere(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.carrier.hung = {"site-4"}

    first = scene.owner.run_round(1, 0.5)
    scene.carrier.hung = set()
    second = scene.owner.run_round(2, 0.5)

    assert first.left_out == {"site-4": "late"}
    assert "site-4" not in second.shares
    assert scene.fleet.late == {"site-4": 1}
    torch.testing.assert_close(scene.w, 0.75 * mean_of(0, 1, 2, 3))
    assert "site-4" in scene.owner.run_round(3, 0.5).shares


def test_a_second_reply_to_one_order_is_no_answer(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    after = scene.w.clone()
    scene.carrier.again = list(scene.carrier.replies)

    scene.owner.run_round(2, 0.5)

    assert sum(scene.fleet.late.values()) == 5
    torch.testing.assert_close(scene.w, after + 0.5 * (mean_of(0, 1, 2, 3, 4) - after))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda terms: {"digest": "9" * 64}, "other_run"),
        (lambda terms: {"config": terms.config.model_copy(update={"max_norm": 1e9})}, "over_norm"),
    ],
)
def test_a_site_of_another_run_file_is_left_out_and_after_two_refusals_shut_out(tmp_path, change, reason):
    scene = Scene(tmp_path, [*parabolas(*FIVE[:4]), Parabola(torch.full((2,), 50.0))], max_norm=10.0)
    lying = scene.carrier.sites["site-4"].__self__
    lying._terms = replace(lying._terms, **change(scene.terms))

    first = scene.owner.run_round(1, 0.5)
    scene.owner.run_round(2, 0.5)

    assert first.left_out == {"site-4": reason}
    assert scene.owner.excluded_sites == {"site-4": f"refused again: {reason}"}
    assert "site-4" not in scene.owner.run_round(3, 0.5).asked
    assert (scene.w - mean_of(0, 1, 2, 3)).abs().max() < 0.5


def test_a_site_that_answers_in_anothers_name_counts_as_neither(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE[:3]))
    scene.carrier.sites["site-2"] = scene.carrier.sites["site-1"]

    record = scene.owner.run_round(1, 1.0)

    assert sorted(record.shares) == ["site-0", "site-1"] and record.left_out == {"site-2": "other_bringer"}


@pytest.mark.parametrize("lead", ["the update", "its values"])
def test_a_site_whose_update_another_one_hands_in_first_counts_in_every_round_and_stays(tmp_path, lead):
    scene = Scene(tmp_path, parabolas(*FIVE))
    # whoever carries frames for the attacker has the victim's reply before the owner has
    victim, attacker = scene.carrier.sites["site-3"], scene.carrier.sites["site-1"].__self__

    def hands_in(order, payload):
        reply, values = victim(order, payload)
        if order.kind != "train" or lead == "the update":
            return reply, values
        body = json.loads(reply.header)["body"] | {"site": "site-1"}
        header = sign_update(UpdateHeader(**body), attacker._identity).decode("ascii")
        return reply.model_copy(update={"header": header}), values

    scene.carrier.sites["site-1"] = hands_in
    records = []
    for number in (1, 2, 3):
        scene.owner._draw_cohort = lambda number, held: ("site-1", "site-3", "site-0", "site-2", "site-4")
        records.append(scene.owner.run_round(number, 0.5))

    assert all("site-3" in one.shares for one in records) and scene.owner.excluded_sites == {}
    assert [one.left_out for one in records] == [{"site-1": "other_bringer"} if lead == "the update" else {}] * 3


def test_honest_sites_with_other_data_are_far_in_every_round_and_none_is_shut_out(tmp_path):
    near = [Parabola(torch.tensor([1.0, 1.0 + number / 100])) for number in range(4)]
    far = [Parabola(torch.tensor([9.0, -5.0])), Parabola(torch.tensor([-7.0, 8.0])), Parabola(torch.tensor([8.0, 9.0]))]
    scene = Scene(tmp_path, [*near, *far], aggregator="median", byzantine=1)

    records = [scene.owner.run_round(number, 0.5) for number in range(1, 7)]

    assert scene.owner.excluded_sites == {} and all(len(one.shares) == 7 for one in records)
    assert {site: one["far_rounds"] for site, one in records[-1].metrics_row().items()} == {
        f"site-{number}": 6 if number > 3 else 0 for number in range(7)
    }


def test_a_site_that_was_shut_out_after_its_update_came_keeps_no_owner_from_going_on(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    weights = scene.w.clone()
    scene.owner.run_round(2, 0.5)
    scene.owner._exclude_site("site-4", "spoiled a sum")

    scene.begin_owner(weights)
    scene.owner.resume_rounds(1)
    record = scene.owner.run_round(2, 0.5)

    assert sorted(record.shares) == ["site-0", "site-1", "site-2", "site-3"]


def test_refusals_that_show_a_lie_are_kept_with_their_evidence_over_sessions(tmp_path):
    scene = Scene(tmp_path, [*parabolas(*FIVE[:4]), Parabola(torch.full((2,), 50.0))], max_norm=10.0)

    def lie():
        site = scene.carrier.sites["site-4"].__self__
        site._terms = replace(site._terms, config=site._terms.config.model_copy(update={"max_norm": 1e9}))

    lie()
    scene.owner.run_round(1, 0.5)
    (line,) = [one for one in scene.journal._read_entries() if "refused" in one]
    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(1)
    lie()
    scene.owner.run_round(2, 0.5)

    assert (line["refused"], line["reason"]) == ("site-4", "over_norm") and '"site":"site-4"' in line["header"]
    assert scene.owner.excluded_sites == {"site-4": "refused again: over_norm"}


def test_training_that_ends_in_no_numbers_is_a_fault_and_no_lie(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.trainers["site-4"].target = torch.full((2,), float("inf"))

    for number in (1, 2, 3):
        assert scene.owner.run_round(number, 0.5).left_out == {"site-4": "not_finite"}
    assert scene.owner.excluded_sites == {}


def test_a_rule_stands_a_site_that_the_mean_does_not(tmp_path):
    lied = [*parabolas(*FIVE[:4]), Parabola(torch.full((2,), -1e4))]
    undefended = Scene(tmp_path / "mean", lied)
    defended = Scene(tmp_path / "median", lied, aggregator="median", byzantine=1)

    undefended.owner.run_round(1, 1.0)
    defended.owner.run_round(1, 1.0)

    assert undefended.w.max() < -1000
    assert (defended.w - mean_of(0, 1, 2, 3)).abs().max() < 2


def test_a_round_with_too_few_updates_changes_nothing_and_goes_on_with_what_it_had(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE), min_cohort=5)
    scene.carrier.deadly = {"site-3": "train"}

    with pytest.raises(
        FailedRoundError, match=r"round 1: 4 updates, federated.min_cohort = 5; missing: site-3 \(gone\)"
    ):
        scene.owner.run_round(1, 1.0)
    assert torch.equal(scene.w, torch.zeros(2))
    scene.carrier.deadly = {}
    scene.begin_site("site-3")
    record = scene.owner.run_round(1, 1.0)

    assert sorted(record.shares) == sorted(scene.trainers)
    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3, 4))
    assert [one.num_trained for one in scene.trainers.values()] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_admitted", [2, 5])
def test_a_killed_owner_goes_on_with_the_updates_that_it_had(tmp_path, monkeypatch, num_admitted):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    weights = scene.w.clone()
    take, taken = scene.owner._take_answer, []

    def killed_after_some(answer: SiteAnswer, record, held):
        take(answer, record, held)
        taken.append(answer.site)
        if len(taken) == num_admitted:
            raise KeyboardInterrupt

    monkeypatch.setattr(scene.owner, "_take_answer", killed_after_some)
    with pytest.raises(KeyboardInterrupt):
        scene.owner.run_round(2, 0.5)
    scene.begin_owner(weights)
    scene.owner.resume_rounds(1)
    record = scene.owner.run_round(2, 0.5)

    assert len(record.shares) == 5
    torch.testing.assert_close(scene.w, 0.75 * mean_of(0, 1, 2, 3, 4))
    assert [scene.trainers[site].num_trained for site in taken] == [2] * num_admitted
    # the journal does not keep what a site says of its loss
    assert math.isnan(record.mean_loss) == (num_admitted == 5)


def test_a_round_whose_checkpoint_was_lost_is_done_again_and_nothing_counts_twice(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    weights = scene.w.clone()
    scene.owner.run_round(2, 0.5)
    lost = scene.w.clone()

    scene.begin_owner(weights)
    scene.owner.resume_rounds(1)
    scene.owner.run_round(2, 0.5)

    assert torch.equal(scene.w, lost)


def test_what_a_site_sent_in_an_earlier_session_is_a_replay_in_a_later_one(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    old = {one.site: one for one in scene.carrier.replies}
    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(1)
    honest = scene.carrier.sites["site-0"]

    def replays(order, payload):
        reply, _ = honest(order, payload)
        return reply.model_copy(update={"header": old["site-0"].body["header"]}), old["site-0"].payload

    scene.carrier.sites["site-0"] = replays

    assert scene.owner.run_round(2, 0.5).left_out == {"site-0": "other_round"}


def test_a_line_that_a_crash_has_cut_is_as_if_it_had_not_been(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.owner.run_round(1, 0.5)
    path = tmp_path / "journal" / "rounds.jsonl"
    path.write_bytes(path.read_bytes() + b'{"closed": 2, "si')

    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(1)

    assert len(scene.owner.run_round(2, 0.5).shares) == 5


def test_half_of_the_sites_are_drawn_by_the_seed(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE, [6.0, 5.0]), fraction=0.5)

    drawn = [scene.owner.run_round(number, 0.1).asked for number in range(1, 7)]

    assert {len(one) for one in drawn} == {3} and len(set(drawn)) > 1
    again = Scene(tmp_path / "again", parabolas(*FIVE, [6.0, 5.0]), fraction=0.5)
    assert [again.owner.run_round(number, 0.1).asked for number in range(1, 7)] == drawn


def test_sites_measure_on_their_own_rows(tmp_path):
    scene = Scene(tmp_path, parabolas(*FIVE))
    scene.carrier.deadly = {"site-1": "measure"}

    found = scene.owner.measure_at_sites()

    assert {site: one.loss for site, one in found.items()} == {
        "site-0": 1.0,
        "site-2": 13.0,
        "site-3": 25.0,
        "site-4": 41.0,
    }


@pytest.mark.parametrize(
    ("num_targets", "classes"),
    [
        (5, ((0, 0, 0),)),
        (5, ((5, 4, 4),)),
        (5, ((4, 5, 4),)),
        (5, ((5, 5, 6),)),
        (4, ((2, 1, 1), (2, 3, 2), (1, 1, 0))),
        (3, ((1, 2, 2), (2, 1, 1))),
    ],
)
def test_counts_that_no_rows_have_are_not_taken(num_targets, classes):
    with pytest.raises(ValidationError, match="classes"):
        m.MeasuredReply(ticket=1, loss=1.0, num_targets=num_targets, classes=classes)


def test_counts_of_rows_and_of_none_are_taken():
    some = m.MeasuredReply(ticket=1, loss=1.0, num_targets=5, classes=((3, 2, 2), (2, 3, 2)))
    none = m.MeasuredReply(ticket=1, loss=0.0, num_targets=0, classes=((0, 0, 0), (0, 0, 0)))

    assert (some.classes[0], none.num_targets) == ((3, 2, 2), 0)


@pytest.mark.parametrize("loss", [1e10, -1e10])
def test_a_loss_that_no_training_has_is_not_taken(loss):
    with pytest.raises(ValidationError, match="loss"):
        m.TrainedReply(ticket=1, loss=loss, num_targets=1, samples=1, scaled=1.0, train_s=0.0)


# --- secure sums


def secure(home, **more) -> Scene:
    return Scene(home, parabolas(*FIVE), **{"secure": True, "min_cohort": 3, "max_norm": 10.0, **more})


def test_the_secure_sum_is_the_mean_that_the_owner_does_not_see(tmp_path):
    scene = secure(tmp_path)

    record = scene.owner.run_round(1, 1.0)

    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3, 4), atol=1e-6, rtol=1e-6)
    assert {one.norm for one in record.shares.values()} == {None} and len(record.sums) == 1
    sent = b"".join(bytes(one.payload) for one in scene.carrier.replies if one.kind == "trained")
    assert sent == b""


@pytest.mark.parametrize("phase", ["train", "join", "share", "mask", "consent", "release"])
def test_a_site_may_leave_a_sum_in_every_phase(tmp_path, phase):
    scene = secure(tmp_path)
    scene.carrier.deadly = {"site-4": phase}

    record = scene.owner.run_round(1, 1.0)

    # one that has deposited is in the sum, whether it stays or not
    stays = phase in ("consent", "release")
    assert (len(record.shares) == 5) == stays
    torch.testing.assert_close(scene.w, mean_of(*range(5 if stays else 4)), atol=1e-6, rtol=1e-6)
    assert len(scene.owner.run_round(2, 0.1).shares) == 4


def test_a_sum_that_too_few_are_left_for_changes_nothing_and_a_later_one_has_another_number(tmp_path):
    scene = secure(tmp_path)
    scene.carrier.deadly = {"site-3": "mask", "site-4": "mask"}
    number = scene.journal.next_sum()

    with pytest.raises(FailedRoundError, match="3 of 5 clients, 4 needed"):
        scene.owner.run_round(1, 1.0)
    assert torch.equal(scene.w, torch.zeros(2))
    scene.carrier.deadly = {}
    scene.begin_site("site-3")
    scene.begin_site("site-4")
    record = scene.owner.run_round(1, 1.0)

    assert record.sums == (number + 2,)
    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3, 4), atol=1e-6, rtol=1e-6)


def test_a_rule_over_buckets_of_sums_stands_a_site_that_nobody_sees(tmp_path):
    trainers = [Parabola(torch.tensor([1.0, 1.0 + number / 10])) for number in range(8)] + [
        Parabola(torch.full((2,), -9.0))
    ]
    keys = {"secure": True, "min_cohort": 3, "max_norm": 20.0}
    undefended = Scene(tmp_path / "mean", trainers, **keys)
    defended = Scene(tmp_path / "median", trainers, **keys, bucket=3, aggregator="median", byzantine=1)

    undefended.owner.run_round(1, 1.0)
    record = defended.owner.run_round(1, 1.0)

    assert len(record.sums) == 3
    assert undefended.w[0] < 0 < 0.9 < defended.w[0] < 1.1


def test_the_sites_of_a_scene_are_known_by_their_keys():
    assert len({one.public.public_key for one in IDENTITIES.values()}) == len(IDENTITIES)


def test_the_owner_measures_how_long_each_site_took_whatever_it_claims(tmp_path):
    clock = iter(range(1000))
    scene = Scene(tmp_path, parabolas(*FIVE[:3]))
    scene.fleet._clock = lambda: float(next(clock))
    liar = scene.carrier.sites["site-2"]
    scene.carrier.sites["site-2"] = lambda *order: (
        (reply := liar(*order))[0].model_copy(update={"train_s": 1e9}),
        reply[1],
    )
    scene.carrier.hung = {"site-0"}

    record = scene.owner.run_round(1, 0.5)

    assert record.shares["site-2"].train_s == 1e9
    phases = record.site_phases()
    assert sorted(phases) == ["site-1", "site-2"]
    assert phases["site-2"] == {"train": record.answer_s["site-2"], "transfer": 0.0}
    assert 0 < record.answer_s["site-2"] < 1000


@pytest.mark.parametrize("weight", [1e10, 1e30])
def test_a_loss_beyond_what_a_reply_may_say_is_one_word_and_ends_no_site(tmp_path, weight):
    scene = Scene(tmp_path, parabolas([1.0], [2.0], [3.0]), max_norm=1e29)
    scene.owner.weights = {"w": torch.full((1,), weight)}

    with pytest.raises(FailedRoundError, match=r"site-0 \(not_finite\)"):
        scene.owner.run_round(1, 0.5)
    scores = scene.owner.measure_at_sites()

    assert scores.keys() == (set() if weight > 1e20 else set(scene.trainers))
