"""A company trains on no text of a worker that lied in what was drawn, names it, and shows why to any reader."""

import json
from dataclasses import replace

import pytest
from rollout_scene import END, Writers, after_a_step

from phalanx.errors import DataError, EvidenceError
from phalanx.lab.attacks.rollouts import ROLLOUT_ATTACKS, make_liar
from phalanx.pipeline.evidence.checked import Pins
from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    RolloutCheck,
    RolloutRequest,
    RolloutWriter,
    SamplerConfig,
    generate_rollouts,
    pack_answer,
)
from phalanx.rollouts.evidence import explain_any_evidence, explain_rollout_evidence

ALL = RolloutCheck(rate=1.0)
NONE = RolloutCheck(rate=0.0)
SIGNED = {"two_answers"}
"""Attacks that a worker's own signatures prove, with no weights and no draw."""


def different_tokens(rollout):
    """The reward of these tests: the share of different tokens, which is below 1 for most texts."""
    return len(set(rollout.ids)) / (2 * len(rollout.ids))


@pytest.fixture(scope="module")
def scene(policy):
    """The policy of the second step, its model, and a request of eight prompts with six texts each."""
    later = after_a_step(policy)
    request = RolloutRequest(
        step=1,
        policy=later.full_digest,
        seed=3,
        sampler=SamplerConfig(max_new_tokens=24, sketch_every=8),
        prompts=tuple(Prompt(number=n, ids=tuple((7 * n + 3 * k) % 250 + 6 for k in range(6))) for n in range(8)),
        samples=6,
        ends=(END,),
    )
    model = PolicyModel.from_policy(later)
    return later, model, request, generate_rollouts(model, request)


def first_step(owner, policy, request):
    """One honest step before, so that workers have an older policy to be stale with."""
    before = request.model_copy(update={"step": 0, "policy": policy.full_digest, "prompts": request.prompts[:2]})
    return owner.generate(policy, PolicyModel.from_policy(policy), before)


def tokens(rollouts):
    return [(one.prompt, one.sample, one.ids) for one in rollouts]


def test_a_worker_whose_certificate_is_revoked_writes_nothing_more_and_is_not_convicted(scene, tmp_path):
    policy, model, request, alone = scene

    with Writers(tmp_path, {"writer-0": RolloutWriter(), "writer-1": RolloutWriter()}, NONE) as owner:
        owner.dismiss_revoked({"writer-1": "the laptop was stolen", "somebody": "else"}, 1)
        found = owner.generate(policy, model, request)

    assert tokens(found) == tokens(alone)
    (dismissal,) = owner.dismissals
    assert (dismissal.party, dismissal.cause, dismissal.step) == ("writer-1", "revoked", 1)
    assert dismissal.reason == "its certificate was revoked: the laptop was stolen"
    assert (owner.active_workers, owner.verdicts) == (("writer-0",), [])


def test_an_honest_company_writes_what_one_process_writes(scene, tmp_path):
    policy, model, request, alone = scene
    writers = {"writer-0": RolloutWriter(), "writer-1": RolloutWriter("eager"), "writer-2": RolloutWriter(batch_rows=2)}

    with Writers(tmp_path, writers, RolloutCheck(rate=0.5), different_tokens) as owner:
        found = owner.generate(policy, model, request)

    assert tokens(found) == tokens(alone)
    assert owner.verdicts == []
    # 8 prompts for three workers are 18, 18 and 12 texts
    assert (owner.costs.texts, owner.costs.checked_texts) == (48, 24)


KINDS = sorted(set(ROLLOUT_ATTACKS) - SIGNED)
LIARS = [
    # each kind quickly, careful and careless in turn; their other pairs among the slow tests
    pytest.param(kind, careful, id=f"{kind}-{'careful' if careful else 'careless'}", marks=marks)
    for number, kind in enumerate(KINDS)
    for careful, marks in ((number % 2 == 0, ()), (number % 2 == 1, pytest.mark.slow))
]


@pytest.mark.parametrize(("kind", "careful"), LIARS)
def test_a_liar_is_named_and_nothing_of_it_is_trained_on(kind, careful, policy, scene, tmp_path):
    later, model, request, alone = scene
    writers = {"writer-0": RolloutWriter(), "writer-1": make_liar(kind, careful=careful)}
    line = ROLLOUT_ATTACKS[kind]

    with (company := Writers(tmp_path, writers, ALL, different_tokens)) as owner:
        if kind == "stale_policy":
            first_step(owner, policy, request)
        found = owner.generate(later, model, request)

    assert tokens(found) == tokens(alone)
    assert {one.reward for one in found} == {None}
    assert owner.active_workers == ("writer-0",)
    if kind == "invented_reward":
        # the rule is the owner's, so nobody else could check a conviction
        (dismissal,) = owner.dismissals
        assert (owner.verdicts, dismissal.party, dismissal.cause) == ([], "writer-1", "reward")
        return
    (verdict,) = owner.verdicts
    assert (verdict.party, verdict.step, verdict.offence) == ("writer-1", 1, line.careful if careful else line.careless)
    facts = explain_any_evidence(tmp_path / verdict.evidence, company.pki / "authority.pem", "run-1")
    assert facts["conclusion"].startswith("holds: writer-1 signed")


@pytest.mark.quick_cases("0.0", "1e-05")
@pytest.mark.parametrize("lr", [1e-5, 1e-6, 0.0])
def test_a_policy_that_is_older_by_a_step_within_every_tolerance_is_named_and_an_honest_worker_never(
    policy, scene, tmp_path, lr
):
    request, later = scene[2], after_a_step(policy, lr=lr)
    model = PolicyModel.from_policy(later)
    request = request.model_copy(update={"policy": later.full_digest})
    writers = {"writer-0": RolloutWriter("eager"), "writer-1": make_liar("stale_policy", careful=False)}

    with (company := Writers(tmp_path, writers, RolloutCheck(rate=0.25))) as owner:
        first_step(owner, policy, request)
        found = owner.generate(later, model, request)

    assert tokens(found) == tokens(generate_rollouts(model, request))
    if lr == 0.0:
        # equal weights are no older ones
        assert owner.verdicts == []
        return
    (verdict,) = owner.verdicts
    assert (verdict.party, verdict.offence) == ("writer-1", "stale")
    facts = explain_any_evidence(tmp_path / verdict.evidence, company.pki / "authority.pem", "run-1")
    assert facts["conclusion"].startswith("holds: writer-1 signed")
    assert facts["rests on the owner's word"] == "nothing"


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_every_liar_wins_where_nothing_is_read_again(kind, policy, scene, tmp_path):
    later, model, request, alone = scene
    writers = {"writer-0": RolloutWriter(), "writer-1": make_liar(kind)}

    with Writers(tmp_path, writers, NONE, different_tokens) as owner:
        if kind == "stale_policy":
            first_step(owner, policy, request)
        found = owner.generate(later, model, request)

    assert owner.verdicts == []
    lied = tokens(found) != tokens(alone) or {one.reward for one in found} != {None}
    assert lied


def test_two_answers_to_one_request_prove_themselves(policy, scene, tmp_path):
    later, model, request, alone = scene
    writers = {"writer-0": RolloutWriter(), "writer-1": make_liar("two_answers")}

    with (company := Writers(tmp_path, writers, NONE)) as owner:
        first_step(owner, policy, request)
        # the second answer of the step before has come by now, whenever it came
        found = owner.generate(later, model, request)

    (verdict,) = owner.verdicts
    assert tokens(found) == tokens(alone)
    assert (verdict.party, verdict.offence) == ("writer-1", "equivocation")
    facts = explain_any_evidence(tmp_path / verdict.evidence, company.pki / "authority.pem", "run-1")
    assert facts["conclusion"].startswith("holds: writer-1")


def test_where_all_lie_the_owner_writes_itself(scene, tmp_path):
    policy, model, request, alone = scene
    liars = {f"writer-{n}": make_liar("copied_text") for n in range(2)}

    with Writers(tmp_path, liars, ALL) as owner:
        found = owner.generate(policy, model, request)

    assert tokens(found) == tokens(alone)
    assert [one.party for one in owner.verdicts] == ["writer-0", "writer-1"]


class Refusing(RolloutWriter):
    """A worker that has no time."""

    def write_answers(self, request):
        raise DataError("no time")


def test_a_worker_that_cannot_answer_is_passed_over_and_not_blamed(scene, tmp_path):
    policy, model, request, alone = scene

    with Writers(tmp_path, {"writer-0": RolloutWriter(), "writer-1": Refusing()}, ALL) as owner:
        found = owner.generate(policy, model, request)

    assert tokens(found) == tokens(alone)
    assert (owner.verdicts, owner.active_workers) == ([], ("writer-0", "writer-1"))


class Altered(RolloutWriter):
    """A worker with an answer that is altered after it was written."""

    def __init__(self, alter):
        super().__init__()
        self._alter = alter

    def write_answers(self, request):
        return [self._alter(*one) for one in super().write_answers(request)]


@pytest.mark.parametrize(
    ("alter", "offence", "words"),
    [
        (lambda a, p: (a, p[:-4]), "form", "its lines need"),
        (lambda a, p: (a.model_copy(update={"lines": a.lines[1:]}), p), "form", "its lines need"),
        (
            lambda a, p: (a.model_copy(update={"lines": a.lines[::-1]}), p),
            "form",
            "sent 24 texts, expected 24 in order",
        ),
    ],
    ids=["cut payload", "fewer lines", "other order"],
)
def test_an_answer_that_no_honest_worker_sends_is_found_without_any_draw(alter, offence, words, scene, tmp_path):
    policy, model, request, alone = scene

    with (company := Writers(tmp_path, {"writer-0": RolloutWriter(), "writer-1": Altered(alter)}, NONE)) as owner:
        found = owner.generate(policy, model, request)

    (verdict,) = owner.verdicts
    assert tokens(found) == tokens(alone)
    assert verdict.offence == offence
    assert words in verdict.reason
    facts = explain_any_evidence(tmp_path / verdict.evidence, company.pki / "authority.pem", "run-1")
    assert facts["conclusion"].startswith("holds")


@pytest.fixture(scope="module")
def evidence(scene, tmp_path_factory):
    """The evidence of one lie, and the authority of its parties."""
    home = tmp_path_factory.mktemp("evidence")
    policy, model, request, _ = scene
    with (company := Writers(home, {"writer-0": make_liar("int8_weights")}, ALL)) as owner:
        owner.generate(policy, model, request)
    return home / owner.verdicts[0].evidence, company.pki / "authority.pem"


def altered(path, change, target):
    """Copy evidence with one change in its record."""
    record = json.loads(path.read_text())
    change(record)
    (target / path.name).write_text(json.dumps(record))
    (target / record["tensors"]["file"]).write_bytes(path.with_suffix(".safetensors").read_bytes())
    return target / path.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["verdict"].update(party="owner"), "from owner to writer-0, expected from any party to owner"),
        (
            lambda r: r["verdict"].update(offence="sketch"),
            "writer-0 of sketch; a reader finds writer-0 guilty of draw",
        ),
        (lambda r: r["verdict"].update(step=2), "accuses writer-0 of draw; a reader finds"),
        (lambda r: r["verdict"].update(request="0" * 64), "accuses writer-0 of draw; a reader finds"),
        (lambda r: r["tensors"].update(sha256="0" * 64), "altered or swapped"),
        (lambda r: r["headers"].pop("request"), "has no signed header for 'request'"),
        (lambda r: r["headers"].pop("answer"), "has no signed header for 'answer'"),
        (lambda r: r["headers"]["answer"].update(signature="00" * 64), "a header does not hold"),
        (lambda r: r.update(config=r["config"].replace('"use_cache":true', '"use_cache":false')), "the request names"),
        (lambda r: r.update(surplus=1), "is no evidence of this version"),
    ],
)
def test_altered_evidence_convicts_nobody_here(change, words, evidence, tmp_path):
    path, authority = evidence

    with pytest.raises(EvidenceError, match=words):
        explain_rollout_evidence(altered(path, change, tmp_path), Pins(authority.read_bytes(), "run-1"))


def test_evidence_of_another_session_is_refused(evidence):
    path, authority = evidence

    with pytest.raises(EvidenceError, match="belongs to the session 'run-1', expected 'run-2'"):
        explain_any_evidence(path, authority, "run-2")


class Framed(RolloutWriter):
    """A worker that answers honestly, and later sends the same answer once more."""

    def write_answers(self, request):
        answers = super().write_answers(request)
        return [*answers, *answers]


def test_the_same_answer_twice_is_no_lie(scene, tmp_path):
    policy, model, request, alone = scene

    with Writers(tmp_path, {"writer-0": Framed()}, ALL) as owner:
        found = owner.generate(policy, model, request)

    assert (tokens(found), owner.verdicts) == (tokens(alone), [])


def test_texts_with_other_words_of_one_prompt_do_not_move_the_draws_of_another(scene):
    _, model, request, alone = scene
    fewer = request.model_copy(update={"prompts": request.prompts[3:5]})

    found = generate_rollouts(model, fewer)

    assert tokens(found) == [one for one in tokens(alone) if one[0] in (3, 4)]


def test_a_reward_that_is_right_is_believed(scene, tmp_path):
    policy, model, request, _ = scene

    class Paid(RolloutWriter):
        """A worker that says what its texts earn."""

        def write_answers(self, request):
            texts = generate_rollouts(model, request)
            return [pack_answer(request, [replace(one, reward=different_tokens(one)) for one in texts])]

    with Writers(tmp_path, {"writer-0": Paid()}, ALL, different_tokens) as owner:
        found = owner.generate(policy, model, request)

    assert owner.verdicts == []
    assert [one.reward for one in found] == [pytest.approx(different_tokens(one)) for one in found]
