"""What happens to a company's steps and parties leaves a log that two verifiers believe, and no shorter one."""

import json

import pytest

from phalanx.errors import AuditLogError, NoHolderError
from phalanx.pipeline import AuditDraw, GuardConfig, PipelineConfig
from phalanx.security.audit import AuditLog
from phalanx.testing import Actor, MemoryCompany, tampering, tiny_run
from phalanx.train.records.audit_trail import session_rules, step_noter
from phalanx.train.records.proof import verify_run
from phalanx.train.records.samples import samples_digest
from phalanx.train.setup.stage_source import RoundModules
from phalanx.verifier.forms import RefusedError
from phalanx.verifier.log import verify

STEPS = 6
KEY = bytes(range(32))
RATES = {"audit_rate": 0.5, "step_audit_rate": 0.25, "owner_audit_rate": 0.25}


@pytest.fixture
def make_company(cache, tmp_path_factory):
    made = []

    def make(guard, actors=None, nonce=None, plan=None, **pipeline):
        run = tiny_run(pipeline=PipelineConfig(**({"stages": 4, "step_timeout_s": 60.0} | pipeline)), guard=guard)
        draw = None if nonce is None else AuditDraw.from_guard(KEY, nonce, guard)
        company = MemoryCompany(run, tmp_path_factory.mktemp("company"), actors, cache=cache, draw=draw)
        company.plan = company.plan.model_copy(update=plan or {})
        made.append(company)
        company.__enter__()
        note = company.engine._context.notes.records._note
        company.engine._context.notes.records._note = lambda record: (
            note(record),
            company.events.append(("step", record)),
        )
        return company

    yield make
    for company in made:
        company.__exit__(None, None, None)


def late_nonce(guard):
    """Under which microbatch 0 of stage 2 is drawn for the first time in step 3."""
    for n in range(1000):
        nonce = n.to_bytes(32, "big")
        draw = AuditDraw.from_guard(KEY, nonce, guard)
        drawn = [0 in draw.draw_microbatches(step=s, epoch=0, stage=2, num_microbatches=4) for s in range(4)]
        if drawn == [drawn[0], False, False, True]:
            return nonce
    raise AssertionError


def write_log(company, change=lambda events: events, steps_a_round=None):
    """Write what a session would have written about all that has happened."""
    company.engine.settle_last_step()
    home, run, draw = company._home, company.run_config, company.draw
    parties = (*run.pipeline.worker_names, *run.pipeline.late_workers)
    opening = {
        **session_rules(run, home, parties),
        "step": 0,
        "steps": company.engine.next_step,
        "stages": [{} for _ in range(run.pipeline.stages)],
        "audit_key_commitment": draw.key_commitment,
        "audit_nonce": draw.nonce.hex(),
        **({} if steps_a_round is None else {"steps_a_round": steps_a_round}),
    }
    for name in ("events.jsonl", "steps.jsonl"):
        (home.path / name).unlink(missing_ok=True)
    with AuditLog(home.path / "events.jsonl", home.owner, "simulation") as log:
        log.append_event("run_started", opening)
        for kind, body in change(list(company.events)):
            if kind == "step":
                step_noter(log, lambda step: samples_digest([step]) if step else None)(body)
            else:
                log.append_event(kind, json.loads(json.dumps(body)))
        log.append_event("run_completed", {"final_weights_digest": ""})
        log.append_event("audit_key_revealed", {"commitment": draw.key_commitment, "key": draw._key.hex()})
    return home.path


def assert_proven(company, num_steps=STEPS):
    run_dir = write_log(company)
    proof = verify_run(run_dir)
    second = verify(run_dir, (run_dir / "owner.pem").read_text())

    assert (proof.steps, proof.proven, proof.unproven) == (num_steps, num_steps, ())
    assert (second.proven, second.doubts) == (set(range(num_steps)), [])
    assert proof.audits == second.audits
    steps = [n for n, (kind, _) in enumerate(company.events) if kind == "step"]
    # a step that was undone may be missing, its later record is the one that counts
    last = steps[-1]
    write_log(company, lambda events: events[:last] + events[last + 1 :])
    with pytest.raises(AuditLogError, match="has no record"):
        verify_run(run_dir)
    with pytest.raises(RefusedError, match="is missing"):
        verify(run_dir, (run_dir / "owner.pem").read_text())


def test_a_conviction_that_reaches_back_leaves_records_of_what_was_undone_and_done_again(make_company):
    def tamper(direction, step, microbatch, tensor):
        return tensor * 0.9 if direction == "forward" and microbatch == 0 and step >= 1 else tensor

    guard = GuardConfig(keep_states=40, audit_rate=0.25, step_audit_rate=0.0, owner_audit_rate=0.0)
    company = make_company(guard, {"worker-2": Actor(tampering(tamper))}, nonce=late_nonce(guard))
    company.run(STEPS)

    assert company.evicted == ["worker-2"]
    assert company.event_bodies("rolled_back")
    recorded = [body.step for kind, body in company.events if kind == "step"]
    assert len(recorded) > len(set(recorded)) == STEPS
    assert_proven(company)


@pytest.mark.slow
def test_a_worker_in_its_second_life_signs_with_the_certificate_of_its_first(make_company):
    company = make_company(GuardConfig(**RATES), returns=1)
    company.run(1)
    company.kill_worker("worker-1")
    company.run(1)
    assert company.come_back("worker-1") == "worker-1.2"
    steps = 2
    while company.event_bodies("party_joined") == []:
        company.run(1)
        steps += 1
    company.run(2)

    assert "worker-1.2" in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert_proven(company, steps + 2)


def test_a_run_that_goes_back_to_its_checkpoint_leaves_a_log_that_is_believed(make_company):
    company = make_company(GuardConfig(**RATES), spares=1)
    company.run(2)
    company.save_step()
    company.run(2)
    company.kill_worker("worker-1")
    company.kill_worker("worker-2")
    company.kill_worker("worker-3")
    with pytest.raises(NoHolderError):
        company.run(1)
    back = company.fall_back()
    company.events.append(("fell_back", {"from_step": 4, "to_step": back}))
    company.run(STEPS - back)

    assert back == 2
    assert_proven(company)


@pytest.mark.quick_cases("{'mode'*")
@pytest.mark.parametrize(
    "removed",
    [{"shadow": "snapshot"}, {"mode": "paper"}, {"third_party_audit_rate": 0.5}, {"shadow": "replica"}],
    ids=str,
)
def test_a_log_of_a_guard_that_this_version_has_not_is_refused_whole(make_company, monkeypatch, removed):
    company = make_company(GuardConfig(**RATES))
    company.run(1)
    write = GuardConfig.model_dump
    monkeypatch.setattr(GuardConfig, "model_dump", lambda self, **how: write(self, **how) | removed)
    run_dir = write_log(company)
    monkeypatch.undo()

    with pytest.raises(AuditLogError, match=f"its guard is from another version: .*{next(iter(removed))}"):
        verify_run(run_dir)


def rounds_events(company, numbers):
    """Rounds of two steps, as the pipeline of a site has them."""
    modules = RoundModules(company.source, company.plan)
    weights = {name: one.detach().clone() for name, one in modules.trained_parameters.items()}
    for number in numbers:
        library = modules.begin_round(weights, 2 * (number - 1))
        company.events.append(("round_begun", {"round": number, "step": 2 * (number - 1)}))
        company.engine.fall_back(library, 2 * (number - 1), library.stage_digests())
        company._next_step = 2 * (number - 1)
        company.run(2)
        company.engine.settle_last_step()


@pytest.mark.slow
def test_the_log_of_a_site_may_lack_rounds_that_it_took_no_part_in_and_no_step_of_those_that_it_has(make_company):
    company = make_company(GuardConfig(**RATES), plan={"steps_a_round": 2})
    rounds_events(company, (1, 3, 3))
    run_dir = write_log(company, steps_a_round=2)
    certificate = (run_dir / "owner.pem").read_text()

    proof, second = verify_run(run_dir), verify(run_dir, certificate)

    assert (proof.steps, proof.proven, proof.unproven) == (4, 4, ())
    assert "proves its rounds" in " ".join(proof.remarks)
    assert (second.proven, second.doubts) == ({0, 1, 4, 5}, [])
    # without the word of a round that began, its steps follow a gap
    for kept, opening in (
        (lambda events: [one for one in events if one[0] != "round_begun"], 2),
        (list, 3),
        (list, None),
    ):
        write_log(company, kept, steps_a_round=opening)
        with pytest.raises(AuditLogError, match=r"has no record|a round begins at step"):
            verify_run(run_dir)
        with pytest.raises(RefusedError, match=r"is missing|a round begins at step"):
            verify(run_dir, certificate)


def test_a_log_with_work_of_a_convicted_party_in_doubt_is_not_called_proven(make_company):
    """That every drawn audit was done says nothing of steps of a liar for which none was drawn."""
    company = make_company(GuardConfig(**RATES))
    company.run(STEPS)
    doubt = {"party": "worker-1", "stage": 1, "convicted_in": [5], "steps": [[0, 3]], "num_steps": 4}
    verdict = {"party": "worker-1", "step": 5}

    told = verify_run(write_log(company, lambda events: [*events, ("verdict", verdict), ("in_doubt", doubt)]))
    clean = verify_run(write_log(company))

    (sentence,) = told.in_doubt
    assert sentence.startswith("steps 0 to 3 of stage 1 were computed by worker-1, which was convicted")
    assert "NOT that they are right: steps 0 to 3" in told.conclusion
    assert (clean.in_doubt, "NOT" in clean.conclusion) == ((), False)


def sign_lines(company, run_dir, change):
    """Write the log again with other lines, each a kind and a body, as its owner can."""
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (run_dir / "events.jsonl").unlink()
    with AuditLog(run_dir / "events.jsonl", company._home.owner, "simulation") as log:
        for kind, body in change([(line["kind"], line["body"]) for line in lines]):
            log.append_event(kind, body)


def test_no_session_begins_behind_steps_without_a_record(make_company):
    """Nobody has audited what they did to the weights; a first session may begin with another run's state alone."""
    company = make_company(GuardConfig(**RATES))
    company.run(2)
    company.engine.settle_last_step()
    run_dir = write_log(company)
    certificate = (run_dir / "owner.pem").read_text()
    assert verify_run(run_dir).proven == len(verify(run_dir, certificate).proven) == 2

    def begin_late(lines):
        (kind, opening), *rest = lines
        return [(kind, {**opening, "step": 1}), *[line for line in rest if line[1].get("step") != 0]]

    def begin_again(lines):
        (_, opening), *rest, key = lines
        last = [("run_started", {**opening, "step": 1000, "steps": 1000}), rest.pop()]
        return [*lines[:1], *rest, *last, key]

    def adopt(lines):
        return [("adopted", {"run": "another", "step": 1, "manifest": "0" * 64}), *begin_late(lines)]

    def adopt_late(lines):
        (adopted, opening, *rest) = adopt(lines)
        return [(opening[0], {**opening[1], "step": 0}), adopted, *rest]

    for change in (begin_late, begin_again, adopt_late):
        sign_lines(company, write_log(company), change)
        with pytest.raises(AuditLogError, match="has no record"):
            verify_run(run_dir)
        with pytest.raises(RefusedError, match="is missing"):
            verify(run_dir, certificate)

    sign_lines(company, write_log(company), adopt)
    remarks = verify_run(run_dir).remarks, verify(run_dir, certificate).remarks
    assert all("the state of run" in " ".join(sentences) for sentences in remarks)


def test_a_resumed_run_without_a_guard_has_a_log_that_is_whole(make_company):
    """Ranks, sites and clients have no records of steps, so that none is missing where the run goes on."""
    company = make_company(GuardConfig(**RATES))
    run_dir = write_log(company)
    sessions = [
        ("run_started", {"step": 0, "steps": 6}),
        ("run_completed", {}),
        ("run_resumed", {"step": 6, "steps": 9}),
        ("run_completed", {}),
    ]
    sign_lines(company, run_dir, lambda lines: sessions)

    proof, second = verify_run(run_dir), verify(run_dir, (run_dir / "owner.pem").read_text())

    assert (proof.is_guarded, proof.unproven) == (False, ())
    assert second.is_completed
    assert second.doubts == [f"line {number}: the guard was off: no step was verified" for number in (1, 3)]
