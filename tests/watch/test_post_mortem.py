"""The card of a run names the cause that was injected, the party, what is safe, and what to type next."""

import json

import pytest

from phalanx.errors import (
    AuditLogError,
    CertificateError,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    FailedBatchError,
    FailedRoundError,
    ModelError,
    NoHolderError,
    NonFiniteLossError,
    PeerLostError,
    PrivacyBudgetError,
    RewardError,
    TransportError,
)
from phalanx.train.records.failure import describe_failure
from phalanx.watch.post_mortem import CAUSES, make_card, needs_card, remove_card, write_card
from watched_run import VERDICT, append_rows, event_row, metric_row, write_run


def failed_with(error, cause=None):
    """The summary of a run that an error ended."""
    error.__cause__ = cause
    try:
        raise error
    except type(error) as exc:
        return {"status": "failed", "failure": describe_failure(exc)}


LOST = event_row("lost", {"party": "worker-1", "step": 9, "stages": [1]})
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\nValueError: no\n'
COMPLETED = {"status": "completed"}
INJECTED = {
    "killed worker": ("killed_party", "worker-1", {"events": [LOST], "summary": COMPLETED}, None),
    "killed worker that ended the run": (
        "killed_party",
        "worker-1",
        {"events": [LOST], "summary": failed_with(NoHolderError("stage 1 has no holder"))},
        None,
    ),
    "worker that crashed": ("crashed_party", "worker-1", {"events": [LOST], "summary": COMPLETED}, TRACE),
    "worker without memory": (
        "out_of_memory",
        "worker-1",
        {"events": [LOST], "summary": COMPLETED},
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\n",
    ),
    "worker without room for a thread": (
        "out_of_memory",
        "worker-1",
        {"events": [LOST], "summary": COMPLETED},
        f"{TRACE}RuntimeError: can't start new thread\n",
    ),
    "worker that crashed before it joined": (
        "crashed_party",
        "worker-1",
        {"summary": failed_with(PeerLostError("worker-1 ended before it joined: Extension modules: numpy"))},
        "Fatal Python error: Aborted\n",
    ),
    "owner without memory": ("out_of_memory", "owner", {"summary": failed_with(MemoryError())}, None),
    "full disk": (
        "full_disk",
        "",
        {"summary": failed_with(CheckpointError("x: cannot be written"), OSError(28, "full"))},
        None,
    ),
    "full disk under the log": (
        "full_disk",
        "",
        {"summary": failed_with(DiskError("events.jsonl: cannot be written"))},
        None,
    ),
    "read-only disk": ("full_disk", "", {"summary": failed_with(CheckpointError("x"), OSError(30, "read-only"))}, None),
    "batch of NaN": (
        "nan_batch",
        "",
        {
            "events": [event_row("batch_skipped", {"step": 4, "number": 5, "reason": "loss is nan"})],
            "summary": COMPLETED,
        },
        None,
    ),
    "NaN that stays": ("non_finite", "", {"summary": failed_with(NonFiniteLossError("step 9: the loss is nan"))}, None),
    "batches that all fail": (
        "non_finite",
        "",
        {"summary": failed_with(FailedBatchError("three batches in a row"))},
        None,
    ),
    "expired certificate": (
        "expired_certificate",
        "",
        {"summary": failed_with(CertificateError("pki/owner: the certificate has expired"))},
        None,
    ),
    "expired certificate of a party": (
        "expired_certificate",
        "worker-2",
        {
            "events": [event_row("not_let_in", {"party": "worker-2", "reason": "its certificate is expired"})],
            "summary": COMPLETED,
        },
        None,
    ),
    "foreign certificate": (
        "refused_certificate",
        "",
        {"summary": failed_with(CertificateError("signed by another"))},
        None,
    ),
    "evicted party": (
        "convicted_party",
        "worker-1",
        {"events": [event_row("verdict", VERDICT)], "summary": COMPLETED},
        None,
    ),
    "silent party": (
        "silent_party",
        "worker-1",
        {
            "events": [event_row("replaced", {"party": "worker-1", "cause": "silent", "step": 3}), LOST],
            "summary": COMPLETED,
        },
        None,
    ),
    "silent party that wrote its stacks": (
        "silent_party",
        "worker-1",
        {
            "events": [event_row("replaced", {"party": "worker-1", "cause": "silent", "step": 3}), LOST],
            "summary": COMPLETED,
        },
        'Thread 0x00007f00 (most recent call first):\n  File "x.py", line 3 in wait\n',
    ),
    "party that withholds": (
        "refused_party",
        "worker-1",
        {
            "events": [event_row("replaced", {"party": "worker-1", "cause": "withheld", "step": 3}), LOST],
            "summary": COMPLETED,
        },
        None,
    ),
    "bad shard": ("bad_data", "", {"summary": failed_with(DataError("shard-3: its digest is another one"))}, None),
    "bad checkpoint": ("bad_checkpoint", "", {"summary": failed_with(CheckpointError("step-30: is damaged"))}, None),
    "bad model": ("bad_model", "", {"summary": failed_with(ModelError("no config.json"))}, None),
    "altered log": ("altered_log", "", {"summary": failed_with(AuditLogError("line 7: the chain is broken"))}, None),
    "spent budget": ("budget_spent", "", {"summary": failed_with(PrivacyBudgetError("epsilon 8 is spent"))}, None),
    "reward that hangs": ("failed_reward", "", {"summary": failed_with(RewardError("no answer in 5 s"))}, None),
    "wrong key": ("wrong_config", "", {"summary": failed_with(ConfigError("train.stepz"))}, None),
    "all parties gone": ("no_party_left", "", {"summary": failed_with(NoHolderError("stage 1 has no holder"))}, None),
    "fault of a library": ("bug", "", {"summary": failed_with(ZeroDivisionError("secret tensor 3.14"))}, None),
    "stopped by a person": ("interrupted", "", {"summary": {"status": "interrupted"}}, None),
    "site that is shut out": (
        "excluded_site",
        "north",
        {"events": [event_row("site_excluded", {"site": "north", "round": 3, "reason": "norm"})], "summary": COMPLETED},
        None,
    ),
    "round without sites": ("failed_round", "", {"summary": failed_with(FailedRoundError("one of three sites"))}, None),
    "broken link": ("lost_link", "", {"summary": failed_with(TransportError("owner: the link broke"))}, None),
    "nothing": ("none", "", {"summary": COMPLETED}, None),
}


@pytest.mark.parametrize("fault", INJECTED)
def test_the_card_names_the_injected_fault(tmp_path, fault):
    word, party, run, log = INJECTED[fault]
    run_dir = write_run(tmp_path / "run", **run)
    if log is not None:
        (run_dir / "workers" / "worker-1.log").write_text(f"worker-1: joined\n{log}")

    card = make_card(run_dir)

    assert (card.cause, card.party) == (word, party)
    assert card.next_command
    assert "RUN" not in card.next_command.split()
    assert f"cause            {word}: {card.sentence}" in card.describe()


def test_a_killed_owner_is_told_by_what_it_did_not_write(tmp_path):
    card = make_card(write_run(tmp_path / "run"))

    assert (card.cause, card.status, card.last_good_step) == ("killed_owner", "gone", 119)
    assert card.next_command.endswith("--resume")


def test_a_run_that_diverged_says_so(tmp_path):
    run_dir = write_run(tmp_path / "run", summary=COMPLETED)
    append_rows(run_dir / "metrics.jsonl", [metric_row(120 + number, loss=7.0 + number) for number in range(30)])

    assert make_card(run_dir).cause == "diverged"


def test_what_else_happened_is_listed_and_the_chain_has_one_cause(tmp_path):
    events = [event_row("batch_skipped", {"step": 1, "number": 1}), event_row("verdict", VERDICT), LOST]
    card = make_card(write_run(tmp_path / "run", events=events, summary=failed_with(NoHolderError("stage 1"))))

    assert (card.cause, card.party) == ("convicted_party", "worker-1")
    assert set(card.also) == {"killed_party of worker-1", "no_party_left", "nan_batch"}
    assert "1 batches were given up" in card.lost


def test_the_card_has_what_is_safe_and_what_is_lost(tmp_path):
    run_dir = write_run(tmp_path / "run", summary=failed_with(DataError("shard-3")))
    (run_dir / "checkpoints" / "step-00000100").mkdir(parents=True)

    card = make_card(run_dir)

    assert (card.last_good_step, card.checkpoint) == (119, 100)
    assert card.lost == "20 steps behind the newest checkpoint: --resume does them again"


def test_a_checkpoint_in_doubt_is_not_the_one_to_go_on_from(tmp_path):
    summary = {"status": "completed", "in_doubt": True, "checkpoint_before_doubt": 60, "verdicts": [VERDICT]}
    run_dir = write_run(tmp_path / "run", summary=summary, events=[event_row("verdict", VERDICT)])
    (run_dir / "checkpoints" / "step-00000100").mkdir(parents=True)

    card = make_card(run_dir)

    assert card.checkpoint == 60
    assert "in doubt" in card.lost


def test_stacks_of_owner_and_processes_are_on_the_card(tmp_path):
    run_dir = write_run(tmp_path / "run", events=[LOST], summary=failed_with(ZeroDivisionError("1/0")))
    (run_dir / "workers" / "worker-1.log").write_text(f"joined\n{TRACE}")

    card = make_card(run_dir)

    assert card.stacks["worker-1"][0] == "Traceback (most recent call last):"
    assert any("failed_with" in frame for frame in card.stacks["owner"])


@pytest.mark.parametrize("fatal", ["", "Fatal Python error: Segmentation fault\n\n"])
def test_the_thread_at_work_is_on_the_card_and_not_only_pools_that_wait(tmp_path, fatal):
    """`faulthandler` writes the thread that has the signal last; a site or enclave has many that wait."""
    pool = "".join(
        f'Thread 0x{n:016x} (most recent call first):\n  File "thread.py", line 81 in w\n\n' for n in range(20)
    )
    run_dir = write_run(tmp_path / "run", events=[], summary=failed_with(ZeroDivisionError("1/0")))
    (run_dir / "sites").mkdir()
    at_work = 'Current thread 0x00007f (most recent call first):\n  File "site.py", line 7 in hang\n'
    (run_dir / "sites" / "north.log").write_text(f"north: joined\n{fatal}{pool}{at_work}")

    stack = make_card(run_dir).stacks["north"]

    assert stack[bool(fatal) :][:2] == tuple(at_work.splitlines())
    assert stack[0].startswith("Fatal" if fatal else "Current")


def test_no_value_of_an_error_that_nobody_raised_on_purpose_is_kept(tmp_path):
    run_dir = write_run(tmp_path / "run", summary=failed_with(ZeroDivisionError("secret tensor 3.14")))

    card = make_card(run_dir)

    for path in write_card(card, run_dir):
        assert "3.14" not in path.read_text()
    assert "secret" not in card.describe()


def test_texts_of_others_are_no_markup_and_steer_no_terminal(tmp_path):
    hostile = "<script>alert(1)</script>`[x](javascript:1)\x1b[2J\n# heading"
    events = [event_row("lost", {"party": hostile}), event_row("verdict", VERDICT | {"party": hostile})]
    run_dir = write_run(tmp_path / "run", events=events, summary=failed_with(DataError(hostile)))

    card = make_card(run_dir)
    markdown, page = (path.read_text() for path in write_card(card, run_dir))

    assert "\x1b" not in card.describe() + markdown + page
    assert "<script>" not in page
    assert "\n# heading" not in markdown


@pytest.mark.parametrize(
    "summary",
    [{}, {"status": 7, "failure": "text"}, {"status": "failed", "failure": {"kind": ["x"], "stack": 3, "message": 4}}],
)
def test_a_summary_of_another_form_breaks_no_card(tmp_path, summary):
    assert make_card(write_run(tmp_path / "run", summary=summary)).cause


@pytest.mark.parametrize(
    ("summary", "needs"),
    [({"status": "failed"}, True), ({"status": "completed", "evicted": ["x"]}, True), (COMPLETED, False), ({}, False)],
)
def test_a_card_is_left_by_a_run_that_failed_or_was_attacked(summary, needs):
    assert needs_card(summary) == needs


def test_causes_have_names_of_their_own_and_end_in_words():
    words = [cause.word for cause in CAUSES]

    assert len(set(words)) == len(words) >= 12
    assert {word for word, *_ in INJECTED.values()} | {"killed_owner", "diverged"} == {*words, "none"}


def test_a_failure_is_described_by_kind_and_places():
    failure = failed_with(CheckpointError("x: cannot be written"), OSError(28, "full"))["failure"]

    assert (failure["kind"], failure["root"], failure["errno"]) == ("CheckpointError", "OSError", 28)
    assert failure["code"].startswith("PHX-")
    assert failure["message"] == "x: cannot be written"
    assert describe_failure(None) is describe_failure(KeyboardInterrupt()) is None


def test_what_a_remote_worker_reports_of_its_threads_is_on_the_card_as_its_claim(tmp_path):
    run_dir = write_run(tmp_path / "run", summary=failed_with(NonFiniteLossError("step 9: the loss is nan")))
    frames = [{"file": "process.py", "line": 7, "function": "_serve_messages"}]
    stacks = {"north": {"threads": [{"frames": frames}]}, "south": {"error": "south: deadline_exceeded: \x1b[2J"}}
    (run_dir / "stacks.json").write_text(json.dumps(stacks))

    card = make_card(run_dir)

    assert card.stacks["north"] == ("as it reports itself:", "main thread:", "  process.py:7 _serve_messages")
    assert card.stacks["south"] == ("none: south: deadline_exceeded: ?[2J",)
    remove_card(run_dir)
    assert not (run_dir / "stacks.json").exists()


@pytest.mark.parametrize(
    "answer", [None, [], 3, {"error": ["x"] * 9999}, {"threads": [{"frames": [{"file": "\x1b"}]}]}]
)
def test_an_altered_file_of_stacks_breaks_no_card_and_steers_no_terminal(tmp_path, answer):
    run_dir = write_run(tmp_path / "run", summary=failed_with(DataError("shard")))
    (run_dir / "stacks.json").write_text(json.dumps({"\x1b[2J" + "x" * 999: answer}))

    text = make_card(run_dir).describe()

    assert "\x1b" not in text
    assert len(text) < 5000
