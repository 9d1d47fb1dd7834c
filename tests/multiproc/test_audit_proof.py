"""Real runs under certificates of `phalanx pki`: what their logs prove to two verifiers, and what neither believes."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_runs import Place, end_all, make_keys, make_place

from phalanx.cli import run_command
from phalanx.config import canonical_json
from phalanx.errors import AuditLogError
from phalanx.security.audit.leaves import LeafFile
from phalanx.security.audit.line import first_head, next_head, signed_part
from phalanx.security.crypto import Identity, load_identity
from phalanx.train.records.proof import verify_run
from phalanx.verifier.forms import RefusedError
from phalanx.verifier.log import verify

# a guarded run of real processes is trained for all of them
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("audit proof")]

STEPS = 10
OFTEN = ("guard.audit_rate=0.25", "guard.step_audit_rate=0.5", "guard.owner_audit_rate=0.9", f"train.steps={STEPS}")
"""Rates of a draw that no test foresees: that no step of a stage is audited whole, or every one is, which would hide a
higher rate, is one chance in a million each."""


AT_STEP = re.compile(r"line \d+: step (\d+)\b")
"""Where a sentence of the second verifier says that a log does not hold."""


@dataclass
class Ran:
    """A finished run, and the owner's keys, which lie elsewhere."""

    place: Place
    run_dir: Path
    owner: Identity


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("guarded"))
    keys = make_keys(place, "owner", "worker-1", "worker-2")
    place.finish(*OFTEN, f"pipeline.pki='{keys}'")
    owner = load_identity(keys / "owner")
    # whoever checks the log later has neither keys nor the directory that the run file names
    shutil.move(keys, place.path / "elsewhere")
    yield Ran(place, place.path / "run", owner)
    end_all(place)


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("unguarded"))
    place.finish("guard.mode='off'", f"train.steps={STEPS}")
    yield Ran(place, place.path / "run", load_identity(place.path / "run" / "pki" / "owner"))
    end_all(place)


@pytest.fixture(params=["summary", "no summary"])
def spoiled(guarded, tmp_path, request):
    """A copy that a test may change, with and without the summary, and without anything else that has seen the end."""
    shutil.copytree(guarded.run_dir, tmp_path / "run")
    for name in ("checkpoints", "secrets"):
        shutil.rmtree(tmp_path / "run" / name)
    if request.param == "no summary":
        (tmp_path / "run" / "summary.json").unlink()
    return Ran(guarded.place, tmp_path / "run", guarded.owner)


def independent(run_dir):
    summary = run_dir / "summary.json"
    heads = (json.loads(summary.read_text())["audit_log_head_signed"],) if summary.exists() else ()
    return verify(run_dir, (run_dir / "owner.pem").read_text(), heads)


def refused_by_both(ran):
    """What both verifiers say; the summary's head is left out where the owner has written the log anew."""
    with pytest.raises(AuditLogError) as ours:
        verify_run(ran.run_dir)
    with pytest.raises(RefusedError) as theirs:
        independent(ran.run_dir)
    return str(ours.value), str(theirs.value)


def events_of(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]


def leaves_of(run_dir, event):
    data = (run_dir / "steps.jsonl").read_bytes()
    start = event["body"]["offset"]
    return data[start : start + event["body"]["size_bytes"]].splitlines()


def write_anew(ran, change_events=lambda events: events, change_leaves=lambda step, leaves: leaves):
    """What the owner itself could do: other leaves, other events, everything signed and chained again."""
    run_dir = ran.run_dir
    events = events_of(run_dir)
    leaves = {e["sequence"]: leaves_of(run_dir, e) for e in events if e["kind"] == "step"}
    (run_dir / "steps.jsonl").unlink()
    events = change_events(events)
    head, lines = first_head(events[0]["run"]), []
    with LeafFile(run_dir / "steps.jsonl", 0) as file:
        for event in events:
            old = event["sequence"]
            if event["kind"] == "step":
                batch = file.append_leaves(change_leaves(event["body"]["step"], leaves[old]))
                event["body"] |= vars(batch)
            event |= {"sequence": head.num_events, "previous": head.digest}
            event["signature"] = ran.owner.sign_data(signed_part(event)).hex()
            lines.append(canonical_json(event))
            head = next_head(head, lines[-1])
    (run_dir / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (run_dir / "summary.json").unlink(missing_ok=True)


def test_a_guarded_run_is_proven_step_by_step_without_its_keys(guarded, capsys):
    assert run_command(["audit", "verify", str(guarded.run_dir)]) == 0

    proof, second = verify_run(guarded.run_dir), independent(guarded.run_dir)
    assert f"{STEPS} of {STEPS} steps" in capsys.readouterr().out
    assert (proof.is_guarded, proof.steps, proof.proven) == (True, STEPS, STEPS)
    assert second.proven == set(range(STEPS))
    assert proof.audits == second.audits > 2 * STEPS
    assert (proof.unproven, second.doubts) == ((), [])


def test_the_report_says_how_many_steps_are_proven(guarded):
    page = (guarded.run_dir / "report.html").read_text()

    assert f"Proven by the audit log: {STEPS} of {STEPS} steps" in page


def test_an_unguarded_run_is_told_apart(unguarded, capsys):
    assert run_command(["audit", "verify", str(unguarded.run_dir)]) == 0

    assert "no step was verified: the guard was off" in capsys.readouterr().out
    found = independent(unguarded.run_dir)
    assert (found.is_guarded, found.proven, found.audits) == (False, set(), 0)


def test_an_unguarded_log_under_the_opening_of_a_guarded_one_is_not_taken_for_one(spoiled):
    write_anew(spoiled, lambda events: [event for event in events if event["kind"] != "step"])

    ours, theirs = refused_by_both(spoiled)
    assert ("step 0 has no record" in ours, "step 0 is missing" in theirs) == (True, True)


@pytest.mark.parametrize("kind", ["audit", "step_audit", "owner_audit", "draw", "commit", "state"])
def test_a_leaf_that_the_owner_leaves_out_is_missed_in_its_step(spoiled, kind):
    at = next(
        event["body"]["step"]
        for event in events_of(spoiled.run_dir)
        if event["kind"] == "step"
        and any(json.loads(leaf)["leaf"] == kind for leaf in leaves_of(spoiled.run_dir, event))
    )

    def change(step, leaves):
        first = next((n for n, leaf in enumerate(leaves) if json.loads(leaf)["leaf"] == kind), None)
        return leaves if step != at or first is None else leaves[:first] + leaves[first + 1 :]

    write_anew(spoiled, change_leaves=change)

    ours, theirs = refused_by_both(spoiled)
    assert ours.startswith(f"step {at} (line ")
    assert AT_STEP.match(theirs)[1] == str(at)


def test_an_audit_that_the_owner_leaves_out_with_its_draw_is_missed_in_its_step(spoiled):
    def change(step, leaves):
        found = [json.loads(leaf) for leaf in leaves]
        draw = next(leaf for leaf in found if leaf["leaf"] == "draw")
        gone = [
            leaf is draw
            or (leaf["leaf"], leaf.get("auditor"), leaf.get("stage")) == ("audit", draw["auditor"], draw["stage"])
            for leaf in found
        ]
        return leaves if step != 3 else [leaf for leaf, out in zip(leaves, gone, strict=True) if not out]

    write_anew(spoiled, change_leaves=change)

    ours, theirs = refused_by_both(spoiled)
    assert (ours[:6], AT_STEP.match(theirs)[1]) == ("step 3", "3")


def test_another_key_nonce_or_rate_than_was_drawn_with_is_refused(spoiled):
    def another_nonce(events):
        opening = next(event for event in events if event["kind"] == "run_started")
        opening["body"]["audit_nonce"] = "5a" * 32
        return events

    write_anew(spoiled, another_nonce)

    ours, theirs = refused_by_both(spoiled)
    # which step it is depends on the draws: one that was audited whole shows no other draw
    assert ("step " in ours, "step " in theirs) == (True, True)


def test_a_higher_rate_than_was_drawn_with_cannot_be_claimed(spoiled):
    def boast(events):
        next(event for event in events if event["kind"] == "run_started")["body"]["guard"]["audit_rate"] = 1.0
        return events

    write_anew(spoiled, boast)

    assert ["step " in text for text in refused_by_both(spoiled)] == [True, True]


def test_a_run_whose_key_is_not_told_proves_no_step(spoiled, capsys):
    write_anew(spoiled, lambda events: [event for event in events if event["kind"] != "audit_key_revealed"])

    assert run_command(["audit", "verify", str(spoiled.run_dir)]) == 5
    assert "not revealed" in capsys.readouterr().err
    found = independent(spoiled.run_dir)
    assert (found.proven, found.doubts != []) == (set(), True)


def test_a_key_that_was_not_committed_to_is_refused(spoiled):
    def other(events):
        next(event for event in events if event["kind"] == "audit_key_revealed")["body"]["key"] = "11" * 32
        return events

    write_anew(spoiled, other)

    assert ["committed" in text for text in refused_by_both(spoiled)] == [True, True]


def test_steps_of_another_run_of_the_same_parties_do_not_count(spoiled):
    def rename(events):
        for event in events:
            event["run"] = "f" * 32
        return events

    write_anew(spoiled, rename)

    assert ["step 0" in text for text in refused_by_both(spoiled)] == [True, True]


@pytest.mark.parametrize("at", [0, 7, -2])
def test_a_leaf_that_somebody_changes_or_exchanges_later_is_refused_in_its_step(spoiled, at):
    path = spoiled.run_dir / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    whole = list(lines)
    for change in ("flip", "swap"):
        lines = list(whole)
        if change == "flip":
            lines[at] = lines[at].replace(b":", b";", 1)
        else:
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
        path.write_bytes(b"".join(lines))

        ours, theirs = refused_by_both(spoiled)
        assert ours.startswith("step ")
        assert AT_STEP.match(theirs)


def test_a_tail_that_was_cut_off_is_never_passed_over(spoiled):
    path = spoiled.run_dir / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for keep in range(len(lines)):
        path.write_bytes(b"".join(lines[:keep]))

        # the key alone may be missing behind the run's end; then its steps are not proven
        assert run_command(["audit", "verify", str(spoiled.run_dir)]) == 5, keep
        try:
            assert independent(spoiled.run_dir).doubts != [], keep
        except RefusedError:
            assert (spoiled.run_dir / "summary.json").exists() or keep < len(lines)


def test_leaves_that_are_missing_are_refused(spoiled):
    (spoiled.run_dir / "steps.jsonl").unlink()

    assert ["step 0" in text for text in refused_by_both(spoiled)] == [True, True]
