"""Rounds with an aggregator in an enclave: the plain weights, rules too, and an owner that opens no single update."""

import contextlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from rounds_scene import IDENTITIES, Parabola, Scene, parabolas

from phalanx.errors import AggregationError, CheckpointError, FailedRoundError, IsolationError, RollbackError
from phalanx.federated.carriers import messages as m
from phalanx.federated.config import FederatedConfig
from phalanx.federated.enclave.aggregator import AggregatorState, EnclaveAggregator
from phalanx.federated.enclave.channel import SEAL, AggregatorAppraisal, bound_terms
from phalanx.federated.enclave.process import run_aggregator
from phalanx.federated.rounds.released import UpdateLog
from phalanx.federated.sealing import SealedPlace, seal_bytes, unseal_bytes
from phalanx.security.crypto import NotRollbackProofCounter
from phalanx.security.tee import SimAttester
from phalanx.split.hardware.measure import measure_code

FIVE = ([1.0, 0.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0])
KEYS = {
    "secure": True,
    "min_cohort": 3,
    "max_norm": 10.0,
    "sums": "enclave",
    "enclave": {"tier": "sim", "allow_insecure_sim": True},
}


class EnclaveScene(Scene):
    """A scene with an aggregator, which begins anew with its owner."""

    attested = measure_code()

    def summed_by(self):
        home = self.home / "enclave"
        home.mkdir(parents=True, exist_ok=True)
        counters = [NotRollbackProofCounter(home / name) for name in ("sealed", "settled")]
        state = AggregatorState(home, bytes(32), self.terms.run, *counters)
        attester = SimAttester(IDENTITIES["site-11"], self.attested)
        self.aggregator = EnclaveAggregator(self.summary_fields, {"w": (2,)}, attester, state)
        return self.aggregator

    @property
    def summary_fields(self):
        """The terms that the host tells the aggregator."""
        return self.terms


def scene_of(home, trainers=None, **more) -> EnclaveScene:
    return EnclaveScene(home, trainers or parabolas(*FIVE), **{**KEYS, **more})


RULE = {"aggregator": "trimmed_mean", "byzantine": 1, "min_cohort": 5}


def mean_of(*numbers: int) -> torch.Tensor:
    return torch.tensor([FIVE[number] for number in numbers]).mean(0)


def test_one_word_of_the_run_file_changes_and_the_weights_have_the_bits_of_the_plain_mean(tmp_path):
    plain = Scene(tmp_path / "plain", parabolas(*FIVE), max_norm=10.0)
    sealed = scene_of(tmp_path / "sealed")

    for number in (1, 2, 3):
        plain.owner.run_round(number, 0.5)
        record = sealed.owner.run_round(number, 0.5)

    assert torch.equal(plain.w, sealed.w)
    assert {one.norm for one in record.shares.values()} == {None} and len(record.shares) == 5
    # what crosses is sealed: the numbers of an update stand nowhere in it
    updates = [bytes(one.payload) for one in sealed.carrier.replies if one.kind == "summed" and len(one.payload) > 100]
    assert len(updates) == 15 and not any(b"site-" in one or b"safetensors" in one or b'"w"' in one for one in updates)


def test_a_rule_looks_at_single_updates_that_the_owner_does_not_see(tmp_path):
    lied = [*parabolas(*FIVE[:4]), Parabola(torch.full((2,), -9.0))]
    undefended = scene_of(tmp_path / "mean", lied, max_norm=100.0)
    defended = scene_of(tmp_path / "median", lied, max_norm=100.0, aggregator="trimmed_mean", byzantine=1, min_cohort=5)

    undefended.owner.run_round(1, 1.0)
    defended.owner.run_round(1, 1.0)

    assert undefended.w.max() < 1 and (defended.w - mean_of(0, 1, 2, 3)).abs().max() < 1


def test_in_each_round_other_sites_are_a_pair_and_the_same_ones_inside_an_enclave(tmp_path):
    rule = {"aggregator": "trimmed_mean", "byzantine": 1, "before": ["bucketing"], "min_cohort": 9, "max_norm": 100.0}
    trainers = [Parabola(torch.tensor([float(number**2), -float(number**3)])) for number in range(1, 10)]
    plain = Scene(tmp_path / "plain", trainers, **rule)
    sealed = scene_of(tmp_path / "sealed", trainers, **rule)

    updates = []
    for number in range(1, 7):
        before = plain.w.clone()
        plain.owner.run_round(number, 1e-4)
        sealed.owner.run_round(number, 1e-4)
        updates.append((plain.w - before).tolist())

    # sites hardly move, so a round is told from another one by its pairs alone
    assert len({round(update[0] * 1e4) for update in updates}) > 2
    assert torch.equal(plain.w, sealed.w)


def test_what_the_enclave_refuses_is_told_by_one_word_and_counts_nowhere(tmp_path):
    scene = scene_of(tmp_path)
    lying = scene.carrier.sites["site-4"].__self__
    lying._terms = replace(lying._terms, config=lying._terms.config.model_copy(update={"max_norm": 1e9}))
    scene.trainers["site-4"].target = torch.full((2,), 1e4)

    record = scene.owner.run_round(1, 1.0)

    assert record.left_out == {"site-4": "over_norm"}
    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3))


@pytest.mark.parametrize("phase", ["train", "attest", "seal"])
def test_a_site_may_leave_in_every_phase(tmp_path, phase):
    scene = scene_of(tmp_path)
    scene.carrier.deadly = {"site-4": phase}

    scene.owner.run_round(1, 1.0)

    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3))


def test_fewer_sites_than_the_cohort_are_no_round(tmp_path):
    scene = scene_of(tmp_path)
    scene.carrier.deadly = dict.fromkeys(["site-2", "site-3", "site-4"], "seal")

    with pytest.raises(FailedRoundError, match="2 updates, expected 3"):
        scene.owner.run_round(1, 1.0)


@pytest.mark.parametrize(
    "forge",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: data + b"x",
    ],
    ids=["nothing", "cut", "altered", "longer"],
)
def test_what_was_altered_on_its_way_does_not_open(tmp_path, forge):
    scene = scene_of(tmp_path)
    honest = scene.carrier.sites["site-4"]

    def forges(order, payload):
        reply, data = honest(order, payload)
        return reply, forge(bytes(data)) if getattr(order, "phase", "") == "seal" else data

    scene.carrier.sites["site-4"] = forges

    assert scene.owner.run_round(1, 1.0).left_out == {"site-4": "malformed"}
    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3))


def test_an_update_of_another_site_or_round_counts_for_nobody(tmp_path):
    scene = scene_of(tmp_path)
    kept = {}
    honest = scene.carrier.sites["site-3"]

    def keeps(order, payload):
        reply, data = honest(order, payload)
        if getattr(order, "phase", "") == "seal":
            kept.setdefault("sealed", bytes(data))
        return reply, data

    scene.carrier.sites["site-3"] = keeps
    scene.owner.run_round(1, 0.5)
    other = scene.carrier.sites["site-4"]
    for name, answer in (("site-4", other), ("site-3", honest)):
        scene.carrier.sites[name] = lambda order, payload, answer=answer: (
            (m.SumReply(ticket=order.ticket), kept["sealed"])
            if getattr(order, "phase", "") == "seal"
            else answer(order, payload)
        )

    assert scene.owner.run_round(2, 0.5).left_out == {"site-3": "malformed", "site-4": "malformed"}


class OtherCode(EnclaveScene):
    """A host that runs other code, and says so: evidence cannot lie about it."""

    attested = bytes(32)


class SmallerCohort(EnclaveScene):
    """A host that tells the aggregator of a cohort of one."""

    @property
    def summary_fields(self):
        return replace(self.terms, config=self.terms.config.model_copy(update={"min_cohort": 1}))


class OtherSites(EnclaveScene):
    """A host that tells the aggregator of other sites' keys: it would be all of them but one."""

    @property
    def summary_fields(self):
        puppet = IDENTITIES["site-10"].public
        return replace(
            self.terms, roster=dict.fromkeys(self.terms.roster, puppet) | {"site-0": IDENTITIES["site-0"].public}
        )


@pytest.mark.parametrize("host", [OtherCode, SmallerCohort, OtherSites])
def test_no_site_seals_for_an_aggregator_of_other_code_or_other_terms(tmp_path, host):
    scene = host(tmp_path, parabolas(*FIVE), **KEYS)

    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 1.0)

    assert not any(len(one.payload) > 100 for one in scene.carrier.replies if one.kind == "summed")


def test_evidence_is_good_for_the_nonce_that_was_asked_for_once_and_for_its_key_alone(tmp_path):
    scene = scene_of(tmp_path)
    site = AggregatorAppraisal(scene.terms)
    public, evidence = scene.aggregator.get_evidence(site.draw_nonce())

    assert site.appraise_key(public + evidence) == public
    with pytest.raises(AggregationError, match="unexpected evidence"):
        site.appraise_key(public + evidence)
    site.draw_nonce()
    with pytest.raises(AggregationError, match="nonce"):
        site.appraise_key(public + evidence)
    _, fresh = scene.aggregator.get_evidence(site.draw_nonce())
    with pytest.raises(AggregationError, match="aggregator"):
        site.appraise_key(bytes(32) + fresh)
    with pytest.raises(AggregationError, match="nonce"):
        scene.aggregator.get_evidence(b"short")


def sealed_by_all(scene: EnclaveScene, names) -> dict[str, bytes]:
    """Sealed updates of the first round, of some sites."""
    payload = scene.owner._weights_payload()
    model = __import__("phalanx.security.crypto", fromlist=["digest_hex"]).digest_hex(payload)
    found = {}
    for name in names:
        answer = scene.carrier.sites[name]
        answer(m.TrainOrder(ticket=1, round=1, model=model, rate=1.0, counted=0), payload)
        _, nonce = answer(m.SumOrder(ticket=2, round=1, model=model, number=1, phase="attest"), b"")
        evidence = b"".join(scene.aggregator.get_evidence(bytes(nonce)))
        _, found[name] = answer(m.SumOrder(ticket=3, round=1, model=model, number=1, phase="seal"), evidence)
    return found, model


def test_an_owner_that_asks_for_the_same_round_without_one_site_gets_nothing_not_even_from_an_enclave_begun_anew(
    tmp_path,
):
    scene = scene_of(tmp_path)
    sealed, model = sealed_by_all(scene, sorted(scene.trainers))
    whole = scene.aggregator.aggregate_updates(1, model, sealed)
    fewer = {name: one for name, one in sealed.items() if name != "site-4"}

    for _ in range(2):
        with pytest.raises(AggregationError, match="other members"):
            scene.aggregator.aggregate_updates(1, model, fewer)
        again = scene.aggregator.aggregate_updates(1, model, sealed)
        assert torch.equal(again.update, whole.update)
        scene.begin_owner()
        # the key is kept as well: what was sealed before a crash opens after it


def test_with_its_book_forgotten_the_owner_reads_one_update_by_the_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(AggregatorState, "note_members", lambda own, model, number, members: None)
    scene = scene_of(tmp_path)
    sealed, model = sealed_by_all(scene, sorted(scene.trainers))

    whole = scene.aggregator.aggregate_updates(1, model, sealed).update
    fewer = scene.aggregator.aggregate_updates(1, model, {n: one for n, one in sealed.items() if n != "site-4"}).update

    torch.testing.assert_close(5 * whole - 4 * fewer, torch.tensor(FIVE[4]), atol=1e-4, rtol=1e-4)


def sums_of_two_aggregators(home) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all sites, and that of all but one by an aggregator that the host has begun from nothing."""
    scene = scene_of(home)
    sealed, model = sealed_by_all(scene, sorted(scene.trainers))
    whole = scene.aggregator.aggregate_updates(1, model, sealed).update
    # counters and book are in it: of a TPM that keeps counters it is the sealed file with their place
    shutil.rmtree(home / "enclave")
    scene.summed_by()
    sealed, model = sealed_by_all(scene, sorted(set(scene.trainers) - {"site-4"}))
    return whole, scene.aggregator.aggregate_updates(1, model, sealed).update


def test_a_host_that_begins_the_aggregator_anew_gets_no_second_sum_for_sites_know_the_key_they_sealed_for(tmp_path):
    with pytest.raises(AggregationError, match="0 updates"):
        sums_of_two_aggregators(tmp_path)


def test_with_sites_that_seal_for_every_aggregator_it_reads_one_update_by_the_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(UpdateLog, "note_update", lambda own, model, number, digest: True)

    whole, fewer = sums_of_two_aggregators(tmp_path)

    torch.testing.assert_close(5 * whole - 4 * fewer, torch.tensor(FIVE[4]), atol=1e-4, rtol=1e-4)


def test_an_aggregator_that_is_started_beside_itself_releases_nothing(tmp_path):
    scene = scene_of(tmp_path)
    sealed, model = sealed_by_all(scene, sorted(scene.trainers))
    first = scene.aggregator
    beside = scene.summed_by()
    beside.aggregate_updates(1, model, sealed)

    with pytest.raises(RollbackError, match="runs twice"):
        first.aggregate_updates(1, model, {name: one for name, one in sealed.items() if name != "site-4"})


def test_a_state_that_is_put_back_missing_or_altered_is_refused(tmp_path):
    scene = scene_of(tmp_path)
    path = tmp_path / "enclave" / "aggregator.sealed"
    old = path.read_bytes()
    scene.owner.run_round(1, 0.5)
    new = path.read_bytes()

    path.write_bytes(old)
    with pytest.raises(RollbackError):
        scene.summed_by()
    path.write_bytes(new[:-1] + bytes([new[-1] ^ 1]))
    with pytest.raises(CheckpointError):
        scene.summed_by()
    path.unlink()
    with pytest.raises(RollbackError, match="is missing"):
        scene.summed_by()
    path.write_bytes(new)
    scene.summed_by()


def test_a_seal_is_for_one_key_and_place():
    from phalanx.security.crypto import HybridSealKey

    private, place = HybridSealKey.generate(), SealedPlace(SEAL, bytes(32), 1, "a" * 64, "site-0")
    sealed = seal_bytes(place, private.public_bytes, b"update")

    assert unseal_bytes(place, private, sealed) == b"update"
    for other in (
        replace(place, round=2),
        replace(place, model="b" * 64),
        replace(place, site="site-1"),
        replace(place, terms=bytes(31) + b"x"),
    ):
        with pytest.raises(AggregationError):
            unseal_bytes(other, private, sealed)
    with pytest.raises(AggregationError):
        unseal_bytes(place, HybridSealKey.generate(), sealed)
    with pytest.raises(AggregationError):
        seal_bytes(place, bytes(32), b"update")


def test_the_terms_are_the_same_on_both_sides_and_other_ones_differ(tmp_path):
    terms = scene_of(tmp_path).terms

    assert bound_terms(terms) == bound_terms(replace(terms, seed=5))
    assert bound_terms(terms) != bound_terms(replace(terms, digest="2" * 64))


def test_an_aggregator_in_a_sandboxed_process_gives_the_same_weights(tmp_path):
    scene = scene_of(tmp_path / "here", enclave={"tier": "process"})
    sealed = None
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(run_aggregator(scene.terms, {"w": (2,)}, tmp_path / "child"))
        except IsolationError as exc:
            pytest.skip(f"this machine confines no process: {exc}")
        scene.aggregator = found
        sealed, model = sealed_by_all(scene, sorted(scene.trainers))
        outcome = found.aggregate_updates(1, model, sealed)
        with pytest.raises(AggregationError, match="other members"):
            found.aggregate_updates(1, model, {name: one for name, one in sealed.items() if name != "site-4"})

    torch.testing.assert_close(outcome.update, mean_of(0, 1, 2, 3, 4))
    assert outcome.members == tuple(sorted(scene.trainers)) and outcome.refused == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secure": False}, "set secure = true"),
        ({"sums": "masked"}, "enclave configures the aggregator"),
        ({"keepers": ["a", "b"]}, "keepers open homomorphic sums"),
        ({"bucket": 3}, "bucket: excludes"),
        ({"privacy": {"epsilon": 1.0, "delta": 1e-3}}, "privacy: excludes"),
        ({"enclave": {"tier": "sim"}}, "NOT SECURE"),
        ({"enclave": {"tier": "process", "allow_insecure_sim": True}}, "NOT SECURE"),
        ({"enclave": {"tier": "tpm"}}, "set policy"),
        ({"min_cohort": 2}, "sites to hide one"),
        ({"algorithm": {"kind": "scaffold"}}, "scaffold"),
        ({"aggregator": "krum", "min_cohort": 5}, "numbers that 1 of them sent"),
        ({"aggregator": "median", "byzantine": 1, "min_cohort": 5}, "numbers that 1 of them sent"),
        ({"aggregator": "median", "byzantine": 1, "min_cohort": 4}, "numbers that 2 of them sent"),
        ({"aggregator": "trimmed_mean", "byzantine": 1, "min_cohort": 3}, "numbers that 1 of them sent"),
        ({"aggregator": "krum", "before": ["bucketing"], "min_cohort": 5}, "numbers that 1 of them sent"),
    ],
)
def test_what_an_aggregator_does_not_go_with_is_refused_by_name(changed, words):
    written = {**KEYS, "sites": ["a", "b", "c", "d", "e"]}

    assert FederatedConfig.model_validate_json(json.dumps({**written, **RULE}))
    with pytest.raises(ValidationError, match=words):
        FederatedConfig.model_validate_json(json.dumps(written | changed))


def test_an_older_run_file_keeps_its_digest_and_a_new_one_says_its_tier():
    older = FederatedConfig.model_validate_json(json.dumps({"sites": ["a", "b", "c"], "secure": True, "min_cohort": 3}))
    newer = FederatedConfig.model_validate_json(json.dumps({**KEYS, "sites": ["a", "b", "c"]}))

    assert not {"sums", "keepers", "enclave"} & older.model_dump().keys()
    assert newer.model_dump()["enclave"]["tier"] == "sim" and "keepers" not in newer.model_dump()
