"""Each attack of the table changes exactly what it says, when it says, from its seed, and writes down each lie."""

import json

import pytest
import torch
from driven_stage import MICROBATCHES, tensor

from phalanx.errors import ConfigError
from phalanx.lab.attacks import ATTACKS, HonestMessage, MessageAttack, check_attack, make_attack
from phalanx.lab.attacks.attack import noise_seed
from phalanx.pipeline import AttackConfig, token_distance

BOTH = {"forward", "backward"}
ON_MESSAGES = {
    "forward_sign_flip": {"forward"},
    "backward_gaussian": {"backward"},
    **dict.fromkeys(("sign_flip", "gaussian", "gaussian_added", "zero", "constant", "nan", "inf", "scale"), BOTH),
    **dict.fromkeys(("drift", "one_sequence", "one_token", "permuted_sequences", "permuted_tokens"), BOTH),
    **dict.fromkeys(("stale_microbatch", "stale_step", "replay", "identity", "adaptive", "audit_aware"), BOTH),
    **dict.fromkeys(("colluders", "league", "crash_when_challenged"), BOTH),
}
ON_THE_WORK = {"lazy_int8", "lazy_int4", "lazy_bf16", "half_layers", "lying_weight_digest"}
ON_STATES = {"wrong_learning_rate", "no_weight_decay", "skipped_update", "weight_drift", "layer_swap"}
ON_GRADIENTS = {"gradient_sign", "gradient_scale", "gradient_topk", "rehearsed_backdoor"}
ON_LETTERS = {"equivocation", "withholding", "withheld_answer", "stall", "forged_receipt"}
ON_AUDITS = {"framing"}
WITH_A_TEST_OF_THEIR_OWN = {"trigger_backdoor"}
WITH_A_DIRECTION = sorted(
    (ON_MESSAGES.keys() - {"forward_sign_flip", "backward_gaussian"}) | {"lazy_int8", "half_layers"}
)
IN_A_COPY = sorted({*ON_MESSAGES, *ON_THE_WORK, *ON_STATES, *ON_GRADIENTS})


def everything_of(step):
    return {(step, direction, m) for direction in BOTH for m in range(MICROBATCHES)}


def told(log):
    """The attackers' log, without the party."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def told_messages(log):
    return {(r["step"], r["direction"], r["microbatch"]) for r in told(log)}


def test_every_attack_of_the_table_is_tested():
    assert set(ATTACKS) == {*IN_A_COPY, *ON_LETTERS, *ON_AUDITS, *WITH_A_TEST_OF_THEIR_OWN}


@pytest.mark.parametrize("kind", sorted(ON_MESSAGES))
def test_an_attack_on_messages_changes_those_of_its_direction_and_nothing_else(kind, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    messages, gradients, states = drive(attack_config(kind), log=log).differences(drive())

    assert {step for step, _, _ in messages} == {2}
    assert {direction for _, direction, _ in messages} == ON_MESSAGES[kind]
    assert (gradients, states) == (set(), set())
    assert told_messages(log) == messages
    assert len(told(log)) == len(messages)
    assert {(r["party"], r["stage"]) for r in told(log)} == {("worker-1", 1)}


@pytest.mark.parametrize("kind", sorted(ON_THE_WORK))
def test_a_cheaper_computation_shows_in_messages_and_weight_gradients_of_its_steps(
    kind, drive, attack_config, tmp_path
):
    log = tmp_path / "attack.jsonl"

    messages, gradients, states = drive(attack_config(kind), steps=3, log=log).differences(drive(steps=3))

    assert messages == everything_of(2) == told_messages(log)
    assert gradients == {2}
    # what it attests to is honest until the false gradient is applied
    assert states == set()


@pytest.mark.parametrize("kind", sorted(ON_STATES))
def test_an_attack_on_the_state_begins_with_the_state_of_its_first_step(kind, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    messages, gradients, states = drive(attack_config(kind), steps=3, log=log).differences(drive(steps=3))

    assert states == {2}
    # the work of the step is honest work on a false state
    assert messages <= everything_of(2)
    assert gradients <= {2}
    (record,) = told(log)
    assert (record["step"], record["what"], record["microbatch"], record["direction"]) == (2, "state", None, None)


@pytest.mark.parametrize("kind", sorted(ON_GRADIENTS))
def test_an_attack_on_the_weight_gradient_leaves_every_message_true(kind, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    messages, gradients, states = drive(attack_config(kind), steps=3, log=log).differences(drive(steps=3))

    assert (messages, gradients, states) == (set(), {2}, set())
    (record,) = told(log)
    assert (record["step"], record["what"]) == (2, "gradient")


@pytest.mark.parametrize("kind", IN_A_COPY)
def test_an_attack_is_the_same_every_time(kind, drive, attack_config):
    first = drive(attack_config(kind))
    torch.manual_seed(123)

    assert first.differences(drive(attack_config(kind))) == (set(), set(), set())


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_at_rate_zero_nobody_lies(kind, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    seen = drive(attack_config(kind, from_step=0, until_step=None, rate=0.0), steps=2, log=log)

    assert seen.differences(drive(steps=2)) == (set(), set(), set())
    assert not log.exists()


@pytest.mark.quick_cases(
    "adaptive",
    "scale",
    "zero",
    "nan",
    "replay",
    "lazy_int8",
    "lying_weight_digest",
    "weight_drift",
    "half_layers",
    "rehearsed_backdoor",
)
@pytest.mark.parametrize("kind", sorted(set(IN_A_COPY) - {"colluders", "league"}))
def test_the_coin_decides_which_steps_are_attacked(kind, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"
    # as in the test of the schedule: at this rate seed 0 lets worker-1 lie in steps 0, 1, 2 of the first four
    config = attack_config(kind, from_step=0, until_step=None, rate=0.3)

    drive(config, log=log)

    found = {record["step"] for record in told(log)}
    assert found <= {0, 1, 2}
    assert {1, 2} <= found
    # a state has no step before the first, and what is repeated must have been said before
    assert (0 in found) == (kind not in {*ON_STATES, "stale_step", "replay"})


@pytest.mark.quick_cases("*-backward")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", WITH_A_DIRECTION)
def test_a_direction_can_be_chosen(kind, direction, drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    messages, _, _ = drive(attack_config(kind, direction=direction), steps=3, log=log).differences(drive(steps=3))

    assert {found for _, found, _ in messages} == {direction}
    assert told_messages(log) == messages


@pytest.mark.parametrize(
    ("kind", "strength"),
    [("scale", 1.001), ("drift", 1e-4), ("gaussian_added", 0.1), ("constant", 3.0)],
)
def test_a_strength_can_be_chosen(kind, strength):
    work = HonestMessage(1, 0, 0, "forward", tensor(0), tensor(1))

    sent = attack(kind, strength=strength).falsify_message(work)

    distance = token_distance(sent, work.result)
    expected = {"scale": 1e-3, "drift": 1e-4, "gaussian_added": 0.1, "constant": 3.0}[kind]
    # the worst token of an honest norm: a tenth of the rms is added to its size
    assert 0.5 * expected < distance < 3 * expected


def attack(kind, **changes):
    return make_attack(AttackConfig(kind=kind, **changes), "worker-1", None)


def test_a_sign_flip_is_exactly_that():
    work = HonestMessage(1, 0, 0, "forward", tensor(0), tensor(1))

    assert torch.equal(attack("forward_sign_flip").falsify_message(work), -work.result)


def test_gaussian_noise_is_standard_normal_and_owes_nothing_to_the_gradient():
    large = HonestMessage(1, 0, 0, "backward", tensor(0), torch.full((32, 64, 16), 1e3))
    small = HonestMessage(1, 0, 0, "backward", tensor(0), torch.zeros(32, 64, 16))

    noise = attack("backward_gaussian").falsify_message(large)

    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(attack("backward_gaussian").falsify_message(small), noise)


def test_noise_differs_by_message_seed_and_party_and_by_nothing_else():
    def noise(step=0, microbatch=0, party="worker-1", **config):
        liar = make_attack(AttackConfig(kind="gaussian", **config), party, None)
        return liar.falsify_message(HonestMessage(1, step, microbatch, "forward", tensor(0), tensor(1)))

    base = noise()
    torch.manual_seed(123)

    assert torch.equal(noise(), base)
    others = [noise(microbatch=1), noise(step=1), noise(seed=1), noise(party="worker-2")]
    assert all(not torch.equal(other, base) for other in others)


def test_noise_is_the_same_on_every_machine():
    assert noise_seed(0, "worker-1", 2, 3) == 37725358847427382


def test_an_attack_that_says_the_truth_is_no_lie(drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    drive(attack_config("scale", strength=1.0), log=log)

    assert not log.exists()


def test_adaptive_lies_move_no_average_of_the_screen():
    work = HonestMessage(1, 0, 0, "forward", tensor(0), tensor(1) + 0.5)

    sent = attack("adaptive").falsify_message(work)

    assert token_distance(sent, work.result) > 1
    assert float(sent.norm()) == pytest.approx(float(work.result.norm()), rel=1e-5)
    assert torch.allclose(sent.mean(dim=(0, 1)), work.result.mean(dim=(0, 1)), atol=1e-5)


@pytest.mark.parametrize("kind", ["permuted_sequences", "permuted_tokens", "one_sequence", "one_token"])
def test_what_is_only_moved_or_mirrored_keeps_every_magnitude(kind):
    work = HonestMessage(1, 0, 0, "forward", tensor(0), tensor(1))

    sent = attack(kind).falsify_message(work)

    assert torch.equal(sent.abs().flatten().sort().values, work.result.abs().flatten().sort().values)
    changed = (sent != work.result).any(dim=-1).sum()
    assert int(changed) == {"one_sequence": 8, "one_token": 1}.get(kind, 16)


def test_the_league_tells_one_lie_with_two_mouths(make_copy, attack_config):
    config = attack_config("league")
    culprit, auditor = (make_attack(config, party, None) for party in ("worker-1", "worker-2"))
    x, gradient = tensor(0), tensor(1)

    held, shadowed = culprit.wrap_copy(make_copy(), True), auditor.wrap_copy(make_copy(), False)
    said = held.runner.forward(2, 0, x), held.runner.backward(2, 0, gradient)
    claimed = shadowed.runner.recompute_microbatch(2, 0, x, gradient)

    truth = make_copy().runner.recompute_microbatch(2, 0, x, gradient)
    assert all(torch.equal(one, other) for one, other in zip(said, claimed, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(said, truth, strict=True))


def test_colluders_lie_in_the_same_steps():
    one, other = (make_attack(AttackConfig(kind="colluders", stages=(1, 3), rate=0.5), p, None) for p in ("a", "b"))

    assert [one.lies_in(step) for step in range(50)] == [other.lies_in(step) for step in range(50)]


def test_a_framer_serves_honestly_and_audits_with_lies(make_copy, attack_config, tmp_path, drive):
    log = tmp_path / "attack.jsonl"
    framer = make_attack(attack_config("framing"), "worker-2", log)
    x, gradient = tensor(0), tensor(1)

    claimed = framer.wrap_copy(make_copy(), False).runner.recompute_microbatch(2, 3, x, gradient)

    truth = make_copy().runner.recompute_microbatch(2, 3, x, gradient)
    assert all(torch.equal(one, -other) for one, other in zip(claimed, truth, strict=True))
    assert [(r["what"], r["direction"], r["microbatch"]) for r in told(log)] == [
        ("framing", "forward", 3),
        ("framing", "backward", 3),
    ]
    assert drive(attack_config("framing")).differences(drive()) == (set(), set(), set())


@pytest.mark.parametrize("kind", sorted(set(IN_A_COPY) - {"league"}))
def test_a_liar_audits_others_honestly(kind, make_copy, attack_config):
    auditor = make_attack(attack_config(kind), "worker-1", None).wrap_copy(make_copy(), False)

    claimed = auditor.runner.recompute_microbatch(2, 0, tensor(0), tensor(1))

    truth = make_copy().runner.recompute_microbatch(2, 0, tensor(0), tensor(1))
    assert all(torch.equal(one, other) for one, other in zip(claimed, truth, strict=True))


@pytest.mark.parametrize("kind", IN_A_COPY)
def test_a_shadow_that_is_promoted_lies_once_and_not_twice(kind, make_copy, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"
    liar = make_attack(attack_config(kind), "worker-1", log)
    copy = liar.wrap_copy(liar.wrap_copy(make_copy(), False), True)

    for step in range(3):
        for m in range(2):
            copy.runner.forward(step, m, tensor(step, m))
            copy.runner.backward(step, m, tensor(step, m, 1))
        copy.apply_update(step, copy.runner.take_gradients(), 1.0)

    places = [(r["step"], r["direction"], r["microbatch"]) for r in told(log)]
    assert len(places) == len(set(places))


def test_a_new_attack_on_messages_is_one_class_with_one_method(make_copy):
    class Ones(MessageAttack):
        def lie(self, work, generator):
            return torch.ones_like(work.result)

    copy = Ones(AttackConfig(kind="ones"), "worker-1", None).wrap_copy(make_copy(), True)

    assert torch.equal(copy.runner.forward(0, 0, tensor(0)), torch.ones(2, 8, 16))


def test_an_unknown_attack_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"attack\.kind: found 'evil'; choices: none, adaptive, .*zero"):
        check_attack(AttackConfig(kind="evil"))


def test_none_is_no_attack():
    check_attack(AttackConfig())
    with pytest.raises(ConfigError, match="found 'none'"):
        make_attack(AttackConfig(), "worker-1", None)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("forward_sign_flip", {"direction": "forward"}),
        ("skipped_update", {"direction": "both"}),
        ("zero", {"strength": 2.0}),
        ("stall", {"strength": 2.0}),
    ],
)
def test_a_choice_that_an_attack_does_not_have_is_refused(kind, choice):
    (key,) = choice
    with pytest.raises(ConfigError, match=rf"attack\.{key}: '{kind}' has none to choose"):
        check_attack(AttackConfig(kind=kind, **choice))


@pytest.mark.parametrize("kind", ["colluders", "league"])
def test_who_has_nobody_to_collude_with_is_refused(kind):
    with pytest.raises(ConfigError, match=r"attack\.stages: .* needs two parties or more, found \[1\]"):
        check_attack(AttackConfig(kind=kind))
