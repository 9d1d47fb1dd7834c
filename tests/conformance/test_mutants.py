"""With any one comparison of the guard inverted or switched off, some test goes red."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from attestation_mutants import ATTESTATION
from split_mutants import SPLIT_PARTIES

from machine_patience import patience_s

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = "tests/pipeline/"
MASK = "tests/security/mask/"


@dataclass(frozen=True)
class Mutant:
    """One change to one file, and a test that must notice it."""

    layer: str
    file: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return self.layer


ISOLATION = "tests/security/isolation/test_isolation_attacks.py::"
MUTANTS = (
    Mutant(
        "isolation: files",
        "security/isolation/landlock.py",
        "kernel.system_call(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)",
        "hash(ruleset)",
        ISOLATION + "test_in_the_sandbox_a_burglar_gets_nothing",
    ),
    Mutant(
        "isolation: system calls",
        "security/isolation/system_calls.py",
        "        rules.load()",
        "        hash(rules)",
        ISOLATION + "test_in_the_sandbox_a_burglar_gets_nothing",
    ),
    Mutant(
        "isolation: memory",
        "security/isolation/inside.py",
        "    become_unreadable()\n",
        "    os.getpid()\n",
        ISOLATION + "test_in_the_sandbox_no_other_process_of_the_user_reads_a_secret",
    ),
    Mutant(
        "mask: the check of products",
        "security/mask/freivalds.py",
        "if not np.array_equal(",
        "if False and not np.array_equal(",
        MASK + "test_masked_offload_attacks.py::test_a_worker_that_bends_one_output_is_found",
    ),
    Mutant(
        "mask: a check that has refused is spent",
        "security/mask/freivalds.py",
        "            self._spent = True",
        "            self._spent = False",
        MASK + "test_product_check.py::test_a_check_that_has_refused_once_refuses_everything",
    ),
    Mutant(
        "mask: random bytes in the key of each range of pads",
        "security/mask/ledger.py",
        "record.reserved, self._fresh(_SALT_BYTES)",
        "record.reserved, b'the same for all'",
        MASK + "test_pad_ledger.py::test_a_ledger_that_was_put_back_repeats_numbers_and_no_pads",
    ),
    Mutant(
        "mask: a ledger older than its counter",
        "security/mask/ledger.py",
        "record.counter < (now := self._counter.read_count()):",
        "record.counter < 0 * (now := self._counter.read_count()):",
        MASK + "test_pad_ledger.py::test_a_hardware_counter_shows_that_a_ledger_was_put_back",
    ),
    Mutant(
        "mask: p is no element",
        "security/mask/pads.py",
        "drawn[drawn != P]",
        "drawn",
        MASK + "test_one_time_pads.py::test_a_word_that_is_p_is_skipped_and_not_folded_onto_zero",
    ),
    Mutant(
        "mask: sums that float64 does not hold",
        "security/mask/ring.py",
        ".max(initial=0)) <= LIMIT)",
        ".max(initial=0)) >= 0)",
        MASK + "test_ring_products.py::test_the_largest_numbers_are_exact_at_every_inner_dimension",
    ),
    Mutant(
        "mask: a row beyond the bound",
        "security/mask/fixed_point.py",
        "if lengths[worst] > bound:",
        "if lengths[worst] > 2 * bound:",
        MASK + "test_fixed_point.py::test_a_row_longer_than_the_bound_is_an_overflow",
    ),
    Mutant(
        "mask: a number that no product can be",
        "security/mask/fixed_point.py",
        "-integers.min(initial=0)) > LARGEST:",
        "-integers.min(initial=0)) > LARGEST + LARGEST:",
        MASK + "test_fixed_point.py::test_a_number_that_no_product_can_be_is_refused",
    ),
    Mutant(
        "L3 the owner's audit before a batch is given up",
        "pipeline/owner/coordinator.py",
        "ledger.owners_audits |= set(facts.watched_stages) - ledger.owner_audited",
        "ledger.owners_audits |= set()",
        PIPELINE + "owner/test_failed_batches.py::test_a_stage_that_would_have_batches_given_up_is_convicted",
    ),
    Mutant(
        "L0 signatures of frames",
        "transport/endpoint.py",
        "frame.header.verify_sender(link.peer)",
        "frame.header.fields",
        "tests/transport/test_endpoint.py::test_an_altered_header_is_refused",
    ),
    Mutant(
        "L0 digest of the payload",
        "transport/frame.py",
        "if digest_hex(frame.payload) != frame.header.fields.payload_digest:",
        "if digest_hex(frame.payload) == '':",
        "tests/transport/test_endpoint.py::test_an_altered_payload_is_refused_and_the_honest_one_passes_afterwards",
    ),
    Mutant(
        "L0 jumping connection",
        "pipeline/verify/audit_judgement.py",
        "if sent_digest == received.digest:",
        "if sent_digest == received.digest or sent_digest is not None:",
        PIPELINE + "verify/test_two_stories.py::test_a_stage_that_commits_to_another_tensor_than_it_sent_is_named",
    ),
    Mutant(
        "L0 session of what is passed on",
        "pipeline/protocol/signed.py",
        "if fields.run != self.session:",
        "if fields.run == '':",
        PIPELINE + "protocol/test_statements.py::test_a_genuine_header_of_anything_else_opens_nothing",
    ),
    Mutant(
        "L0 receiver of what is passed on",
        "pipeline/protocol/signed.py",
        "or receiver not in (None, fields.receiver):",
        "or receiver == '':",
        PIPELINE + "protocol/test_statements.py::test_a_genuine_header_of_anything_else_opens_nothing",
    ),
    Mutant(
        "the offline judge before an eviction",
        "pipeline/owner/verdicts.py",
        "            facts = judge_evidence(path, pins)\n",
        '            facts = {"conclusion": pins.session}\n',
        PIPELINE + "owner/test_verdicts.py::test_what_the_offline_judge_does_not_accept_evicts_nobody",
    ),
    Mutant(
        "the owner is never a verdict's party",
        "pipeline/owner/verdicts.py",
        "if judgement.verdict.party == OWNER:",
        "if judgement.verdict.party == '':",
        PIPELINE + "owner/test_verdicts.py::test_the_owner_is_never_a_verdicts_party",
    ),
    Mutant(
        "draws of a session",
        "pipeline/verify/draw.py",
        'self.derive_secret(b"draws/1 " + nonce)',
        'self.derive_secret(b"draws/1 ")',
        PIPELINE + "verify/test_audit_draw.py::test_the_same_key_draws_the_same_and_every_argument_matters",
    ),
    Mutant(
        "L0 signatures of inputs that are shown",
        "pipeline/protocol/signed.py",
        "        header.verify_sender(peer)\n",
        "        peer.name.strip()\n",
        PIPELINE + "verify/test_two_stories.py::test_a_receiver_that_forges_a_header_is_named_and_not_the_sender",
    ),
    Mutant(
        "L1 screen of what is not finite",
        "pipeline/tolerance/screen.py",
        "if not math.isfinite(rms):",
        "if math.isinf(rms) and False:",
        "tests/pipeline/tolerance/test_screen_statistics.py::test_what_is_not_finite_never_passes",
    ),
    Mutant(
        "L1 screen of norms",
        "pipeline/tolerance/screen.py",
        "if off > max(",
        "if off < -max(",
        "tests/pipeline/tolerance/test_screen_statistics.py::test_another_scale_is_a_hit",
    ),
    Mutant(
        "L2 audit of messages",
        "pipeline/verify/audit_judgement.py",
        "if output is not None and not await self._is_output_confirmed(auditor, report, direction, output):",
        "if output is not None and await self._is_output_confirmed(auditor, report, direction, output):",
        PIPELINE + "test_lying_stages.py::test_a_lie_about_one_microbatch_is_found_when_all_are_audited",
    ),
    Mutant(
        "L2 audit of messages, switched off",
        "pipeline/verify/audit_judgement.py",
        "        if report.digests[direction] == output.digest:\n            return True\n",
        "        return True\n",
        PIPELINE + "test_lying_stages.py::test_a_lie_about_one_microbatch_is_found_when_all_are_audited",
    ),
    Mutant(
        "L2 two stories to stage and auditor",
        "pipeline/verify/audit_judgement.py",
        "if committed.digest != shown.payload_digest:",
        "if committed.digest == '':",
        PIPELINE
        + "verify/test_two_stories.py::"
        + "test_a_sender_that_tells_the_auditor_another_story_is_named_by_its_own_signatures",
    ),
    Mutant(
        "L2 number of draws",
        "pipeline/verify/draw.py",
        "count = math.ceil(expected)",
        "count = 1",
        PIPELINE + "verify/test_audit_draw.py::test_at_rate_one_everything_is_drawn",
    ),
    Mutant(
        "L2 tolerance between numeric classes",
        "pipeline/tolerance/distance.py",
        "if distance <= tolerance:",
        "if distance >= 0:",
        PIPELINE + "tolerance/test_two_numeric_classes.py::test_a_drift_of_one_in_a_thousand_is_found_across_classes",
    ),
    Mutant(
        "L2 drift below the tolerance",
        "pipeline/verify/audit_judgement.py",
        "if drift is not None:",
        "if drift is not None and False:",
        PIPELINE + "tolerance/test_two_numeric_classes.py::test_a_small_drift_to_one_side_is_seen_in_the_long_run",
    ),
    Mutant(
        "L2 audits of whole steps",
        "pipeline/verify/state_judgement.py",
        "if is_same:",
        "if audited.gradient:",
        PIPELINE + "verify/test_step_audits.py::test_a_made_up_weight_gradient_is_found_in_the_step_that_is_audited",
    ),
    Mutant(
        "L2 the owner's audit of messages",
        "pipeline/verify/state_judgement.py",
        "            if named:\n",
        "            if named and False:\n",
        PIPELINE + "verify/test_owner_audits.py::test_the_owners_audit_names_the_stage_and_its_accomplice",
    ),
    Mutant(
        "L2 the owner's audit of gradients",
        "pipeline/verify/state_judgement.py",
        "if is_right:",
        "if commit.gradient:",
        PIPELINE + "verify/test_owner_audits.py::test_the_owners_audit_names_a_league_that_makes_up_a_weight_gradient",
    ),
    Mutant(
        "L3 the owner's audit of updates",
        "pipeline/verify/state_judgement.py",
        "if ruling.party is not None:\n                guilty += self._name_signers",
        "if ruling.party is None:\n                guilty += self._name_signers",
        PIPELINE + "verify/test_owner_audits.py::test_the_owners_audit_names_a_league_that_bends_the_update",
    ),
    Mutant(
        "L0 a class that the bits refute",
        "pipeline/membership/admission.py",
        "return None if answer == owner_answer else self._describe_refusal(party, described, answer, owner_answer)",
        "return None",
        PIPELINE
        + "membership/test_admission.py::"
        + "test_a_worker_with_another_kernel_is_refused_at_the_start_and_told_so",
    ),
    Mutant(
        "L3 weight gradients across classes",
        "pipeline/verify/gradient_bounds.py",
        "return gradient_distance(claimed, audited) <= self._facts.plan.guard.tolerance",
        "return True",
        PIPELINE + "tolerance/test_mixed_fleets.py::test_a_claimed_class_does_not_hide_a_made_up_weight_gradient",
    ),
    Mutant(
        "L3 states of holder and shadow",
        "pipeline/verify/state_judgement.py",
        "if odd is None:",
        "if parties:",
        PIPELINE + "verify/test_wrong_updates.py::test_a_stage_that_reports_a_wrong_state_is_named",
    ),
    Mutant(
        "L3 states of second shadows",
        "pipeline/verify/state_judgement.py",
        "facts.assignment.parties_of(stage), self.reported_states",
        "facts.assignment.parties_of(stage)[:2], self.reported_states",
        PIPELINE + "owner/test_second_shadows.py::test_a_liar_beside_two_shadows_is_named_alone",
    ),
    Mutant(
        "L3 gradients and norms of holder and shadow",
        "pipeline/verify/state_judgement.py",
        "if commit.gradient == held.gradient and same_norm(commit.norm_squared, held.norm_squared, alike=alike):",
        "if commit.gradient:",
        PIPELINE + "verify/test_wrong_updates.py::test_a_shadow_that_reports_another_gradient_or_norm_is_named",
    ),
    Mutant(
        "L3 gradients that no upkeep sends",
        "pipeline/worker/shadowing.py",
        "awaited = context.plan.guard.sends_gradient and message.purpose",
        "awaited = message.purpose",
        PIPELINE + "worker/test_upkeeps.py::"
        "test_a_shadow_in_lockstep_vouches_for_what_it_computed_and_not_for_what_it_was_sent",
    ),
    Mutant(
        "L3 parts of another transfer",
        "pipeline/protocol/tensor_stream.py",
        "if message != about.model_copy(",
        "if message is None and about.model_copy(",
        PIPELINE + "protocol/test_transfer_proof.py::test_anything_else_proves_nothing",
    ),
    Mutant(
        "L0 inputs of a microbatch beyond the step",
        "pipeline/verify/record_claims.py",
        "if message.microbatch < facts.plan.microbatches else None",
        "if message.microbatch >= 0 else None",
        PIPELINE + "verify/test_record_claims.py::"
        "test_a_commitment_to_an_input_that_was_not_sent_here_and_now_convicts_its_author",
    ),
    Mutant(
        "L2 verdicts that are two steps late",
        "pipeline/owner/coordinator.py",
        "and facts.lagging_ledger is None",
        "and facts.ledger is not None",
        PIPELINE + "owner/test_commit_lag.py::test_the_next_step_is_not_decided_before_the_audits_of_the_last_one",
    ),
    Mutant(
        "L2 steps whose audits must not lag",
        "pipeline/verify/audits.py",
        "facts.plan.guard.commit_lag > 0 and not ledger.owners_audits",
        "facts.plan.guard.commit_lag > 0",
        PIPELINE + "owner/test_commit_lag.py::test_a_step_that_the_owner_audits_does_not_lag",
    ),
    Mutant(
        "L2 the copy that a lagging step is audited with",
        "pipeline/worker/shadowing.py",
        "or self._audits.has_audit(shadow.stage_index, shadow.copy.step_count)",
        "or self._audits.has_audit(shadow.stage_index, -1)",
        PIPELINE + "owner/test_commit_lag.py::test_what_is_withheld_while_a_step_lags_is_handed_on",
    ),
    Mutant(
        "L2 inputs of a lagging step",
        "pipeline/worker/stages.py",
        "if slot[0] < step - self.plan.guard.commit_lag",
        "if slot[0] < step",
        PIPELINE + "owner/test_commit_lag.py::test_what_is_withheld_while_a_step_lags_is_handed_on",
    ),
    Mutant(
        "L2 claims about a lagging step",
        "pipeline/worker/stages.py",
        "steps = range(copy.step_count - copy.plan.guard.commit_lag, copy.step_count)",
        "steps = range(0)",
        PIPELINE
        + "owner/test_commit_lag.py::"
        + "test_across_numeric_classes_honest_rounding_in_an_applied_step_is_no_alarm",
    ),
    Mutant(
        "L3 checkpoints of verified steps alone",
        "pipeline/owner/verified_step.py",
        "facts.agreed_states.keys() >= set(facts.watched_stages) and facts.lagging_ledger is None",
        "facts.agreed_states.keys() >= set(facts.watched_stages)",
        PIPELINE + "owner/test_commit_lag.py::test_a_checkpoint_never_holds_a_step_that_is_not_verified",
    ),
    Mutant(
        "L4 the referee's weights of a lagging step",
        "pipeline/worker/request_handlers.py",
        'num_steps = message.step if message.purpose == "weights" and lags else copy.step',
        "num_steps = copy.step",
        PIPELINE + "owner/test_commit_lag.py::test_a_lie_that_was_applied_is_undone_and_its_author_named",
    ),
    Mutant(
        "L5 undoing a step that lags",
        "pipeline/owner/rollback.py",
        "return None if lagging is None else lagging.step",
        "return None",
        # a death is noticed by the rule of two witnesses too, a conviction by nothing else
        PIPELINE + "owner/test_commit_lag.py::test_a_made_up_gradient_that_was_applied_is_undone[1]",
    ),
    Mutant(
        "L3 states after a takeover",
        "pipeline/verify/state_agreement.py",
        "wrong = [name for name, state in states.items() if state != expected]",
        "wrong = [name for name, state in states.items() if state is None]",
        PIPELINE + "verify/test_wrong_updates.py::test_a_party_that_gets_ready_with_an_altered_state_is_named",
    ),
    Mutant(
        "L4 the stage's part of the referee",
        "pipeline/evidence/weighing.py",
        "if finding is None and report is not None else finding",
        "if report is not None else finding",
        PIPELINE + "evidence/test_weighing.py::test_where_both_are_off_the_stage_is_named",
    ),
    Mutant(
        "L4 the bits of a message",
        "pipeline/evidence/weighing.py",
        "is_off = claim.digest != digest_hex(",
        "is_off = claim.digest == digest_hex(",
        PIPELINE + "verify/test_false_accusers.py::test_a_false_digest_names_the_accuser_and_not_the_stage",
    ),
    Mutant(
        "L4 the referee of whole steps",
        "pipeline/evidence/weighing.py",
        "if claim is not None and (claim.digest, claim.norm_squared) != truth:",
        "if claim is not None and (claim.digest, claim.norm_squared) == truth:",
        PIPELINE + "verify/test_step_audits.py::test_an_auditor_that_makes_up_another_weight_gradient_is_named",
    ),
    Mutant(
        "L4 evidence read by others",
        "pipeline/evidence/message_dispute.py",
        'if finding is None or finding.offence != "message":',
        'if finding is not None and finding.offence == "message":',
        PIPELINE + "evidence/test_evidence.py::test_a_disputed_microbatch_is_redone_from_the_evidence_bit_for_bit",
    ),
    Mutant(
        "L4 relayed messages",
        "pipeline/verify/stall_diagnosis.py",
        "await self._relay_message(receiver, missing, answer[1], answer[2])",
        "return sender",
        PIPELINE + "verify/test_silent_parties.py::test_a_withheld_tensor_is_handed_on_and_nobody_is_replaced",
    ),
    Mutant(
        "L5 the shadow inherits",
        "pipeline/assignment/assignment.py",
        "holders[stage] = copies.pop(0)",
        "holders[stage] = workers[0]",
        PIPELINE + "test_lying_stages.py::test_the_shadow_of_the_liar_serves_its_stage_from_then_on",
    ),
    Mutant(
        "L5 going back to before the first bad step",
        "pipeline/owner/rollback.py",
        "(doubtful.ledger.step, oldest)",
        "(doubtful.ledger.step + 4, oldest)",
        PIPELINE + "owner/test_rollback.py::test_the_run_goes_back_to_before_the_first_step_that_was_wrong",
    ),
    Mutant(
        "L5 every life of a certificate is undone",
        "pipeline/owner/rollback.py",
        "return step < self._doubtful_before.get(certified_name(party), 0)",
        "return party == gone",
        PIPELINE + "owner/test_doubt_is_undone.py::test_a_liar_that_leaves_and_comes_back_leaves_no_trace",
    ),
    Mutant(
        "L5 a party that is replaced for what it did is undone",
        "pipeline/owner/rollback.py",
        "verdict is None and not is_distrusted",
        "verdict is None",
        PIPELINE + "owner/test_doubt_is_undone.py::test_who_is_replaced_for_what_it_did_is_undone_as_a_convict_is",
    ),
    Mutant(
        "L5 all parties begin with the owner's state",
        "pipeline/owner/rollback.py",
        "if old is None or self.restored_step is not None:",
        "if old is None:",
        PIPELINE + "owner/test_doubt_is_undone.py::test_an_heir_that_lies_after_a_death_leaves_no_trace",
    ),
    Mutant(
        "L5 a kept state is the agreed one",
        "pipeline/owner/kept_states.py",
        "StageState(stage, party, tensors[0], step, agreed).check_digest()",
        "pass",
        PIPELINE + "owner/test_owners_kept_states.py::test_the_shadow_brings_what_the_holder_does_not",
    ),
    Mutant(
        "L4 which of two wrong norms",
        "pipeline/verify/referee.py",
        "claim = GradientClaim(holder, commit.gradient, commit.norm_squared)",
        "claim = GradientClaim(holder, commit.gradient, redone.signed[1])",
        PIPELINE
        + "worker/test_upkeeps.py::"
        + "test_a_shadow_in_lockstep_finds_a_wrong_norm_in_the_stage_and_not_in_its_auditor",
    ),
    Mutant(
        "L5 heirs that wait for a state",
        "pipeline/assignment/assignment.py",
        "if name in had and name in present and name != holders[stage]",
        "if name != holders[stage]",
        PIPELINE
        + "worker/test_upkeeps.py::"
        + "test_both_holders_of_a_stage_that_are_lost_at_once_cost_the_steps_since_the_checkpoint",
    ),
)
MUTANTS += tuple(Mutant(*one) for one in (*ATTESTATION, *SPLIT_PARTIES))


@dataclass(frozen=True)
class Lab:
    """A copy of the package, and a process that runs single tests against it."""

    package: Path
    server: subprocess.Popen[str]

    def outcome(self, test: str) -> tuple[int, str]:
        """The exit status of pytest, and what it said."""
        output = self.package.parent / "output"
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([str(self.package.parent), test, str(output), patience_s(300.0)]) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline()), output.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def altered(self, file: str, alter: Callable[[str], str]) -> Iterator[None]:
        """Change one file of the copy for a while; its time is kept, by which compiled files are known to fit."""
        path = self.package / file
        healthy, was = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(alter(healthy), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(healthy, encoding="utf-8")
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """All mutants' tests are forks of one process: each would import torch and its kin anew."""
    package = tmp_path_factory.mktemp("mutants") / "phalanx"
    shutil.copytree(ROOT / "src" / "phalanx", package)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PHALANX_TEST_TYPES")}
    command = [sys.executable, str(Path(__file__).parent / "mutant_server.py")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Lab(package, server)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_still_fits_the_source(mutant):
    source = (ROOT / "src" / "phalanx" / mutant.file).read_text(encoding="utf-8")

    assert source.count(mutant.old) == 1
    # one that cannot be imported would be red for that alone
    assert ast.parse(source.replace(mutant.old, mutant.new))


@pytest.mark.slow
def test_a_copy_without_a_mutant_is_green_and_is_the_one_that_is_tested(lab):
    test = "tests/transport/test_endpoint.py::test_an_altered_header_is_refused"

    healthy, said = lab.outcome(test)
    with lab.altered("transport/endpoint.py", lambda _: "raise ImportError('this very copy')\n"):
        _, broken = lab.outcome(test)
    mended, said_again = lab.outcome(test)

    assert healthy == 0, said
    assert "this very copy" in broken
    assert mended == 0, said_again


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_turns_its_test_red(lab, mutant):
    with lab.altered(mutant.file, lambda healthy: healthy.replace(mutant.old, mutant.new)):
        status, said = lab.outcome(mutant.test)

    # 1: tests ran and some failed; 2 and more: nothing was tested
    assert status == 1, said[-2000:]
    assert "= FAILURES =" in said
    # a busy machine is no test that noticed something
    assert "from pytest-timeout" not in said
