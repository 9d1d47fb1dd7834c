"""The post-mortem card of a run that failed or was attacked: cause, party, losses, and the next command."""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.config import printable_text
from phalanx.errors import AuditLogError, PhalanxError
from phalanx.report.shell import make_section, page_shell, write_page
from phalanx.report.svg import make_element
from phalanx.report.tables import make_table
from phalanx.security.audit import verify_log
from phalanx.security.crypto import certificate_facts
from phalanx.telemetry import STACKS_FILE
from phalanx.train.records.owner_key import owner_of
from phalanx.train.records.run_directory import owner_certificate
from phalanx.transport.stacks import PartyStacks
from phalanx.watch.growing_files import Row, read_object, read_tail
from phalanx.watch.run_view import RunView

_MAX_STACK, _MAX_LOG, _MAX_PARTIES, _MAX_CLAIMED_LINES = 24, 400, 256, 80
_STACK = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|Current thread 0x|^Thread 0x")
_AT_WORK, _FATAL = "Current thread 0x", "Fatal Python error"
_CRASH = re.compile(r"Traceback \(most recent call last\)|Fatal Python error")
# a thread needs memory for its stack: Python has no other word for it
_NO_MEMORY = re.compile(r"MemoryError|out of memory|[Cc]an(?:'t|not) (?:allocate memory|start new thread)")
_EXPIRED = re.compile(r"expired|not valid (?:before|after)|validity", re.IGNORECASE)
_DISK_ERRNO = frozenset({28, 122, 27, 30, 5})
MD_FILE, HTML_FILE = "post_mortem.md", "post_mortem.html"


@dataclass(frozen=True)
class CaseFacts:
    """What the files of a run say; facts in, a cause out.

    Attributes:
        failure: ``failure`` of ``summary.json``; empty of a run that did not fail.
        decisions: Events about parties and batches, oldest first, as (kind, body).
        logs: Last lines of each local process's log.
        dies_on_spike: Whether the loss at the end is far above its lowest value, or no number.
    """

    status: str
    failure: Mapping[str, Any]
    decisions: tuple[tuple[str, Row], ...]
    logs: Mapping[str, tuple[str, ...]]
    dies_on_spike: bool = False

    def bodies_of(self, *kinds: str) -> list[Row]:
        """Return the bodies of the events of some kinds, oldest first."""
        return [body for kind, body in self.decisions if kind in kinds]

    def is_failure(self, *kinds: str) -> bool:
        """Whether the run was ended by one of these errors."""
        return self.failure.get("kind") in kinds

    def message_has(self, pattern: re.Pattern[str]) -> bool:
        """Whether the error's message has a pattern."""
        return bool(pattern.search(str(self.failure.get("message") or "")))


@dataclass(frozen=True)
class RunCause:
    """One cause that a card can name.

    Attributes:
        matches: Returns the party that it is about, empty for none, where the facts show this cause; else None.
        next_command: Command row in which RUN, FILE, PARTY and STEP are replaced.
    """

    word: str
    sentence: str
    next_command: str
    matches: Callable[[CaseFacts], str | None]


@dataclass(frozen=True)
class PostMortem:
    """The card.

    Attributes:
        cause: One word of the table; ``none`` where nothing went wrong.
        party: The party that the cause is about; empty for none.
        last_good_step: Number of the last applied step; None before the first.
        checkpoint: Step of the newest checkpoint that is not in doubt; None where there is none.
        lost: Steps and batches that are lost, in a sentence.
        stacks: Stacks of the owner and of local processes, by name; a remote party's are its claim.
        also: Further events of the same run that somebody should know of.
    """

    run: str
    status: str
    cause: str
    sentence: str
    party: str
    last_good_step: int | None
    checkpoint: int | None
    lost: str
    message: str
    next_command: str
    stacks: Mapping[str, tuple[str, ...]]
    also: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    def describe(self) -> str:
        """Return it as text for a terminal."""
        rows = [(name, value) for name, value in self._list_rows() if value]
        stacks = [f"stack of {name}:\n" + "\n".join(f"  {row}" for row in lines) for name, lines in self.stacks.items()]
        return "\n".join([*(f"{name:<16} {value}" for name, value in rows), *stacks])

    def _list_rows(self) -> list[tuple[str, str]]:
        step = "none" if self.last_good_step is None else str(self.last_good_step + 1)
        return [
            ("run", f"{self.run} ({self.status})"),
            ("cause", f"{self.cause}: {self.sentence}"),
            ("party", self.party),
            ("message", self.message),
            ("good steps", step),
            ("checkpoint", "none" if self.checkpoint is None else f"of step {self.checkpoint}"),
            ("lost", self.lost),
            ("also", "; ".join(self.also)),
            ("next", self.next_command),
        ]

    def to_markdown(self) -> str:
        """Return the card as a file; texts of others stand in code, where they cannot be markup."""
        lines = [f"# Post-mortem of {_as_code(self.run)}", ""]
        lines += [f"- **{name}**: {_as_code(value)}" for name, value in self._list_rows() if value]
        for name, stack in self.stacks.items():
            lines += ["", f"## Stack of {_as_code(name)}", "", *(f"    {row}" for row in stack)]
        return "\n".join(lines) + "\n"

    def to_page(self) -> str:
        """Return the card as a page that fetches nothing and runs no script."""
        rows = [[name, value] for name, value in self._list_rows() if value]
        stacks = [
            make_section(f"Stack of {name}", "", make_element("pre", {}, "\n".join(stack)))
            for name, stack in self.stacks.items()
        ]
        card = make_section("What happened", self.sentence, make_table(["", ""], rows))
        return page_shell(
            f"Post-mortem: {self.run}", [make_element("h1", {}, f"Post-mortem of {self.run}"), card, *stacks]
        )


def _as_code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", " ") + "`"


def _party_of(bodies: list[Row]) -> str | None:
    return str(bodies[-1].get("party", bodies[-1].get("worker", ""))) if bodies else None


def _match_error(facts: CaseFacts, *kinds: str) -> str | None:
    return "" if facts.is_failure(*kinds) else None


def _full_disk(facts: CaseFacts) -> str | None:
    errno = facts.failure.get("errno")
    is_full = (isinstance(errno, int) and errno in _DISK_ERRNO) or facts.is_failure("DiskError")
    return "" if is_full or facts.message_has(re.compile("No space left|disk quota", re.IGNORECASE)) else None


def _gone_parties(facts: CaseFacts, *kinds: str) -> list[str]:
    """Return the parties of some events; of a run that ended without its parties, all with a log of this machine.

    A party that ends before it has joined is in no event.
    """
    named = [str(body.get("party", "")) for body in facts.bodies_of(*kinds)]
    return named + (list(facts.logs) if facts.is_failure("NoHolderError", "PeerLostError", "PeerGoneError") else [])


def _out_of_memory(facts: CaseFacts) -> str | None:
    if facts.failure.get("is_out_of_memory"):
        return "owner"
    for party in _gone_parties(facts, "lost", "replaced", "link_broken"):
        if any(_NO_MEMORY.search(row) for row in facts.logs.get(party, ())):
            return party
    return None


def _expired_certificate(facts: CaseFacts) -> str | None:
    if facts.is_failure("CertificateError", "PeerRefusedError") and facts.message_has(_EXPIRED):
        return ""
    refused = [body for body in facts.bodies_of("not_let_in") if _EXPIRED.search(str(body.get("reason", "")))]
    return _party_of(refused)


def _crashed_party(facts: CaseFacts) -> str | None:
    for party in _gone_parties(facts, "lost"):
        if any(_CRASH.search(row) for row in facts.logs.get(party, ())):
            return party
    return None


def _silent_party(facts: CaseFacts) -> str | None:
    return _party_of([body for body in facts.bodies_of("replaced") if body.get("cause") in ("silent", "late")])


def _refused_party(facts: CaseFacts) -> str | None:
    return _party_of([body for body in facts.bodies_of("replaced") if body.get("cause") in ("refused", "withheld")])


def _find_divergence(facts: CaseFacts) -> str | None:
    return "" if facts.dies_on_spike else None


_RESUME = "phalanx train FILE --run-dir RUN --resume"
CAUSES: tuple[RunCause, ...] = (
    RunCause(
        "interrupted",
        "somebody stopped the run (Ctrl-C or SIGTERM)",
        _RESUME,
        lambda f: "" if f.status == "interrupted" else None,
    ),
    RunCause(
        "out_of_memory",
        "a process had not enough memory, or room for a thread",
        "lower train.batch_size or raise train.microbatches; then " + _RESUME,
        _out_of_memory,
    ),
    RunCause("full_disk", "the disk is full, read-only or broken", "free space; then " + _RESUME, _full_disk),
    RunCause(
        "expired_certificate",
        "a certificate has expired, or is not valid yet",
        "phalanx pki issue PARTY (or phalanx invite FILE --name PARTY); then " + _RESUME,
        _expired_certificate,
    ),
    RunCause(
        "refused_certificate",
        "a certificate is foreign, wrong or revoked",
        "phalanx peers RUN",
        lambda f: _match_error(f, "CertificateError", "PeerRefusedError"),
    ),
    RunCause(
        "altered_log",
        "the audit log was altered, cut or reordered",
        "phalanx audit verify RUN",
        lambda f: _match_error(f, "AuditLogError", "CutLogError"),
    ),
    RunCause(
        "bad_checkpoint",
        "a checkpoint is missing, damaged or of another run",
        "phalanx train FILE --run-dir RUN --resume --from-step STEP",
        lambda f: _match_error(f, "CheckpointError"),
    ),
    RunCause(
        "bad_data",
        "a shard, text or tokenizer is missing or damaged",
        "phalanx data verify DATASET",
        lambda f: _match_error(f, "DataError"),
    ),
    RunCause(
        "bad_model",
        "a model directory cannot be read, sliced or adapted",
        "phalanx model inspect DIR",
        lambda f: _match_error(f, "ModelError"),
    ),
    RunCause(
        "wrong_config",
        "a key of a run or worker file is wrong",
        "phalanx train FILE --dry-run",
        lambda f: _match_error(f, "ConfigError"),
    ),
    RunCause(
        "non_finite",
        "loss or gradients became NaN or infinite, and honest recomputation gave the same",
        "phalanx train FILE --run-dir RUN --resume --set optimizer.lr=LOWER",
        lambda f: _match_error(f, "NonFiniteLossError", "FailedBatchError"),
    ),
    RunCause(
        "budget_spent",
        "the privacy budget pays for no further step",
        "phalanx report RUN",
        lambda f: _match_error(f, "PrivacyBudgetError"),
    ),
    RunCause(
        "failed_reward",
        "a reward of a text failed, hung or is no number",
        _RESUME,
        lambda f: _match_error(f, "RewardError"),
    ),
    RunCause(
        "convicted_party",
        "a party was convicted of a wrong result and shut out",
        "phalanx audit verify RUN; phalanx peers RUN --revoke PARTY --reason convicted",
        lambda f: _party_of(f.bodies_of("verdict", "rollout_verdict")),
    ),
    RunCause(
        "refused_party",
        "a party withheld what it had committed to, or accused without a reason",
        "phalanx peers RUN",
        _refused_party,
    ),
    RunCause(
        "crashed_party",
        "the process of a party ended with an error of its own",
        "read RUN/workers/PARTY.log; then " + _RESUME,
        _crashed_party,
    ),
    RunCause(
        "silent_party", "a party was silent or too slow beyond the run's patience", "phalanx peers RUN", _silent_party
    ),
    RunCause(
        "killed_party",
        "a party's process or machine is gone without a word: killed, or without power or network",
        "phalanx peers RUN; start PARTY again unless the run is complete",
        lambda f: _party_of(f.bodies_of("lost")),
    ),
    RunCause(
        "no_party_left",
        "no party is left that holds a stage",
        _RESUME,
        lambda f: _match_error(f, "NoHolderError", "PeerLostError", "PeerGoneError"),
    ),
    RunCause(
        "excluded_site",
        "a site or client was shut out",
        "phalanx report RUN",
        lambda f: next(
            (str(b.get("site", b.get("client", ""))) for b in f.bodies_of("site_excluded", "client_excluded")), None
        ),
    ),
    RunCause(
        "nan_batch",
        "a batch gave NaN or infinity, was given up, and the run went on with the next one",
        "phalanx data where RUN",
        lambda f: "" if f.bodies_of("batch_skipped") else None,
    ),
    RunCause(
        "failed_round",
        "too few sites gave an update",
        _RESUME,
        lambda f: _match_error(f, "FailedRoundError", "UpdateRefusedError"),
    ),
    RunCause(
        "diverged",
        "the loss at the end is far above its lowest value: the run has diverged",
        "phalanx train FILE --run-dir RUN --resume --from-step STEP --set optimizer.lr=LOWER",
        _find_divergence,
    ),
    RunCause(
        "lost_link",
        "a peer or the link to it misbehaved",
        "phalanx peers RUN",
        lambda f: _match_error(f, "TransportError", "FrameError", "OrderError", "SealError", "OutOfBoundsError"),
    ),
    RunCause(
        "killed_owner",
        "the run has neither ended nor a process here: killed by a person or the system, or the machine stopped",
        _RESUME,
        lambda f: "" if f.status == "gone" else None,
    ),
    RunCause(
        "bug",
        "an error that Phalanx does not raise on purpose: a fault of its code, of a library or of own code",
        "phalanx explain PHX-A002",
        lambda f: "" if f.failure else None,
    ),
)
"""Every cause, the first that the facts show counts. To add one: one row, one test with the injected fault."""

_NO_CAUSE = RunCause("none", "nothing went wrong that the files know of", "phalanx report RUN", lambda _: "")


def diagnose(facts: CaseFacts) -> tuple[RunCause, str]:
    """Return the cause of a case, and the party that it is about (empty for none)."""
    for cause in CAUSES:
        party = cause.matches(facts)
        if party is not None:
            return cause, printable_text(party, 80)
    return _NO_CAUSE, ""


def make_card(run_dir: Path) -> PostMortem:
    """Read a run directory, and return its card; every text in it is as untrusted as the file it came from.

    Raises:
        InputError: There is no run in the directory.
    """
    view = RunView(run_dir)
    while view.read_new():
        pass
    failure, status = (view.summary or {}).get("failure"), view.status
    if not isinstance(failure, dict) and view.owner is None and status != "completed":
        # a session that is refused at its beginning leaves the summary of the one before, or none
        failure = _find_refusal(run_dir)
        status = "failed" if failure else status
    logs = {path.name.removesuffix(".log"): tuple(_read_log(path)) for path in view.list_logs()}
    facts = CaseFacts(
        status=status,
        failure=failure if isinstance(failure, dict) else {},
        decisions=tuple(view.decisions),
        logs=logs,
        dies_on_spike=_has_diverged(view),
    )
    cause, party = diagnose(facts)
    last = None if view.last_row is None else int(view.last_row["step"])
    checkpoint = _find_checkpoint(view, run_dir)
    return PostMortem(
        run=printable_text(view.name, 80),
        status=facts.status,
        cause=cause.word,
        sentence=cause.sentence,
        party=party,
        last_good_step=last,
        checkpoint=checkpoint,
        lost=_describe_loss(view, facts, last, checkpoint),
        message=printable_text(str(facts.failure.get("message") or ""), 600),
        next_command=_fill_command(cause.next_command, run_dir, party, checkpoint),
        stacks=_find_stacks(facts) | _read_remote_stacks(run_dir),
        also=tuple(_list_others(facts, cause)),
    )


def _find_refusal(run_dir: Path) -> dict[str, Any]:
    """Return what refuses every session of a run before it begins: an altered log, or an owner's certificate."""
    try:
        certificate = owner_certificate(run_dir)
        if (run_dir / "events.jsonl").is_file():
            verify_log(run_dir / "events.jsonl", owner_of(certificate))
        facts = certificate_facts(certificate.read_bytes(), str(certificate))
    except AuditLogError as exc:
        return {"kind": "AuditLogError", "message": str(exc)}
    except (OSError, PhalanxError):
        # without a certificate nobody can tell
        return {}
    if facts.not_before <= datetime.now(UTC) <= facts.not_after:
        return {}
    days = f"{facts.not_before:%Y-%m-%d} to {facts.not_after:%Y-%m-%d}"
    return {"kind": "CertificateError", "message": f"{certificate}: has expired, or is not valid yet ({days})"}


def write_card(card: PostMortem, run_dir: Path) -> list[Path]:
    """Write ``post_mortem.md`` and ``post_mortem.html`` into a run directory, and return their paths.

    Raises:
        InputError: They cannot be written there.
    """
    return [write_page(run_dir / MD_FILE, card.to_markdown()), write_page(run_dir / HTML_FILE, card.to_page())]


def remove_card(run_dir: Path) -> None:
    """Remove the card of an earlier session of a run, if there is one."""
    for name in (MD_FILE, HTML_FILE, STACKS_FILE):
        with contextlib.suppress(OSError):
            (run_dir / name).unlink()


def needs_card(summary: Mapping[str, Any]) -> bool:
    """Whether a run that has ended failed, or was attacked, or lost a party."""
    return summary.get("status") == "failed" or any(
        summary.get(name) for name in ("verdicts", "evicted", "lost", "replaced")
    )


def _read_log(path: Path) -> list[str]:
    return [printable_text(row, 300) for row in read_tail(path, _MAX_LOG)]


def _has_diverged(view: RunView) -> bool:
    losses = view.history.last_values("loss", 1 << 20)
    if len(losses) < 4:
        return False
    lowest, first = float(losses.min()), float(losses[0])
    # above its beginning, and far above its best: more than noise of a batch
    return float(losses[-1]) > first and float(losses[-1]) > 2 * lowest


def _find_checkpoint(view: RunView, run_dir: Path) -> int | None:
    before = (view.summary or {}).get("checkpoint_before_doubt")
    if (view.summary or {}).get("in_doubt") and isinstance(before, int):
        return before
    folder = run_dir / "checkpoints"
    steps = [
        int(match[0])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.search(r"\d+\Z", path.name))
    ]
    return max(steps, default=None)


def _describe_loss(view: RunView, facts: CaseFacts, last: int | None, checkpoint: int | None) -> str:
    sentences = []
    if facts.status in ("failed", "gone") and last is not None:
        behind = last + 1 - (checkpoint or 0)
        has_journal = (view.path / "journal").is_dir()
        prospect = "the journal may still have them" if has_journal else "--resume does them again"
        sentences.append(f"{behind} steps behind the newest checkpoint: {prospect}" if behind else "no step")
    lost = (view.summary or {}).get("steps_lost")
    if isinstance(lost, int) and lost:
        sentences.append(f"{lost} steps were given up and done again")
    if (view.summary or {}).get("in_doubt"):
        sentences.append("steps of a convicted party are in doubt (summary.json: steps_in_doubt)")
    skipped = len(facts.bodies_of("batch_skipped"))
    if skipped:
        sentences.append(f"{skipped} batches were given up")
    return "; ".join(sentences) or "nothing"


def _fill_command(command: str, run_dir: Path, party: str, checkpoint: int | None) -> str:
    # somebody pastes it into a shell: a party could name itself with a command
    values = {"RUN": shlex.quote(str(run_dir)), "FILE": shlex.quote(str(run_dir / "config.toml"))}
    values |= {"PARTY": shlex.quote(party) if party else "PARTY"}
    values |= {"STEP": "STEP" if checkpoint is None else str(checkpoint)}
    return re.sub(r"\b(RUN|FILE|PARTY|STEP)\b", lambda found: values[found[1]], command)


def _find_stacks(facts: CaseFacts) -> dict[str, tuple[str, ...]]:
    stacks: dict[str, tuple[str, ...]] = {}
    frames = facts.failure.get("stack")
    if isinstance(frames, list) and frames:
        stacks["owner"] = tuple(printable_text(str(frame), 200) for frame in frames[:_MAX_STACK])
    for name, lines in facts.logs.items():
        if stack := _pick_stack(lines):
            stacks[name] = stack
    return stacks


def _pick_stack(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stack of the working thread, which comes last, after the threads of waiting pools."""
    starts = [number for number, row in enumerate(lines) if _STACK.search(row)]
    at_work = [number for number in starts if lines[number].startswith(_AT_WORK)]
    if not at_work:
        return lines[starts[0] : starts[0] + _MAX_STACK] if starts else ()
    faults = [lines[number] for number in starts if lines[number].startswith(_FATAL)]
    return (*faults[-1:], *lines[at_work[-1] : at_work[-1] + _MAX_STACK])


def _read_remote_stacks(run_dir: Path) -> dict[str, tuple[str, ...]]:
    """Return what remote parties said of their threads when they were late or given up or the run failed."""
    stacks: dict[str, tuple[str, ...]] = {}
    for name, answer in list((read_object(run_dir / STACKS_FILE) or {}).items())[:_MAX_PARTIES]:
        try:
            lines = ["as it reports itself:", *PartyStacks.model_validate_json(json.dumps(answer)).list_lines()]
        except ValidationError:
            reason = answer.get("error") if isinstance(answer, dict) else None
            lines = [f"none: {printable_text(str(reason), 200)}"]
        stacks[printable_text(name, 80)] = tuple(lines[:_MAX_CLAIMED_LINES])
    return stacks


def _list_others(facts: CaseFacts, cause: RunCause) -> list[str]:
    """Return what other causes the facts show too, each in a few words."""
    others = []
    for other in CAUSES:
        party = None if other is cause or other.word == "bug" else other.matches(facts)
        if party is not None:
            others.append(f"{other.word}{f' of {printable_text(party, 80)}' if party else ''}")
    return others
