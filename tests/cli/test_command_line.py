"""The command line parses, calls one function, and turns the outcome into an exit code."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phalanx import errors
from phalanx.cli import main, run_command
from tiny_run_file import tiny_run_file

HEAVY = ("torch", "transformers", "grpc", "numpy", "cryptography", "pydantic")


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


def python(code: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


class RunFile(str):
    """Stands in for a run that has neither stages nor ranks."""

    def model_dump(self, mode: str) -> dict[str, str]:
        return {"name": "the run"}


class Recorder:
    """Stands in for a package that trains, reports or measures; remembers how it was called."""

    def __init__(self, summary: dict[str, Any] | None = None, fault: BaseException | None = None) -> None:
        self.summary = summary or {}
        self.fault = fault
        self.is_rank = False
        self.calls: list[tuple[Any, ...]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = {
            "check_inputs": lambda run: None,
            "text_warnings": lambda run: [],
            "drill_result": lambda summary: None,
            "check_directory": lambda run_dir, resume: None,
            "default_directory": lambda run: Path("runs/run"),
        }
        verbs = {
            **looks,
            "load_run": self.load_run,
            "train": self.train,
            "describe_run": self.describe_run,
            "join_as_rank": self.join_as_rank,
            # the stand-in is a run of none of these kinds
            **{kind: type(kind, (), {}) for kind in ("DomainRun", "PipelineRun", "StagedRun")},
        }
        self._module(monkeypatch, "phalanx.train", plays_rank=lambda run: self.is_rank, **verbs)
        self._module(monkeypatch, "phalanx.report", write_report=self.write_report, check_run=lambda run_dir: None)
        cards = dict.fromkeys(("make_card", "remove_card", "write_card"), lambda *what: None)
        self._module(monkeypatch, "phalanx.watch.post_mortem", needs_card=lambda summary: False, **cards)
        self._module(monkeypatch, "phalanx.lab.bench", BENCHES={"pipeline": self.bench}, KEEPING_ROWS={})

    def _module(self, monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def load_run(self, path: Path, overrides: tuple[str, ...] = ()) -> str:
        self.calls.append(("load_run", path, tuple(overrides)))
        return RunFile("the run")

    def train(
        self,
        run: str,
        run_dir: Path | None = None,
        resume: bool = False,
        from_step: int | None = None,
        from_run: Path | None = None,
        ranks: int | None = None,
        open_workers: object = None,
    ) -> dict[str, Any]:
        self.calls.append(("train", run, run_dir, resume))
        if self.fault is not None:
            raise self.fault
        return self.summary

    def join_as_rank(self, run: str, run_dir: Path | None) -> None:
        self.calls.append(("follow", run, run_dir))

    def describe_run(self, run: str) -> str:
        return f"described: {run}"

    def write_report(self, run_dir: Path) -> Path:
        self.calls.append(("write_report", run_dir))
        return run_dir / "report.html"

    def bench(self, quick: bool) -> dict[str, Any]:
        self.calls.append(("bench", quick))
        return {
            "name": "pipeline",
            "rows": [{"arm": "plain"}, {"arm": "guarded_full", "tokens_per_s": 12.345}],
        }


def install(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    recorder.install(monkeypatch)
    return recorder


@pytest.mark.parametrize("arguments", [("-c", "import phalanx"), ("-m", "phalanx", "--help")])
def test_import_and_help_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 0
    assert "phalanx" in loaded
    assert loaded.isdisjoint(HEAVY)


BAD_FILES = {
    "syntax": "steps = = 3\n",
    "unknown key": tiny_run_file("[pipeline]\nstagess = 3\n"),
    "wrong type": tiny_run_file().replace("batch_size = 8", 'batch_size = "eight"'),
    "two engines": tiny_run_file("[pipeline]\nstages = 4\n[parallel]\ndp = 2\n"),
    "an objective that is none": tiny_run_file().replace("seed = 3", 'objective = "magic"'),
}


VERBS = ("train", "plan", "attack", "calibrate", "launch")
FORKING = """
import contextlib, json, os, sys
from phalanx.cli import main, run_command
calls = json.loads(sys.argv[1])
# what commands import before they refuse a file is imported once
for home, verb in {verb: (home, verb) for home, verb in calls}.values():
    run_command([verb, f"{home}/run.toml"])
for home, verb in calls:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    with open(f"{home}/{verb}.out", "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run_command([verb, f"{home}/run.toml"])
        print(code, sorted({"torch", "transformers"} & set(sys.modules)))
        out.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, list[str]]]:
    """Call each command with each wrong file, in a process that is forked from one that has imported no torch."""
    homes = {mistake: tmp_path_factory.mktemp("refused") for mistake in BAD_FILES}
    for mistake, home in homes.items():
        (home / "run.toml").write_text(BAD_FILES[mistake])
    calls = [(str(home), verb) for home in homes.values() for verb in VERBS]
    result = python(FORKING, json.dumps(calls), timeout_s=280.0)
    assert result.returncode == 0, result.stderr
    return lambda mistake, verb: (
        homes[mistake] / "run.toml",
        (homes[mistake] / f"{verb}.out").read_text().splitlines(),
    )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mistake", BAD_FILES)
def test_a_wrong_run_file_is_refused_before_torch_is_imported(
    refused: Callable[[str, str], tuple[Path, list[str]]], verb: str, mistake: str
) -> None:
    path, lines = refused(mistake, verb)

    assert lines[-1] == "2 []"
    assert lines[0].startswith(f"error: {path}: ")


@pytest.mark.parametrize(
    "verb",
    ["train", "plan", "launch", "worker", "report", "attack", "bench", "reproduce", "audit verify", "audit explain"],
)
def test_the_help_of_each_verb_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command([*verb.split(), "--help"])

    assert code == 0
    assert f"Example: phalanx {verb} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", ["train", "plan", "launch", "worker", "report", "attack", "bench", "reproduce", "audit", "pki", "enclave"]
)
def test_the_help_lists_each_verb_with_a_sentence(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0

    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"│ {verb} ")]
    assert len(line.strip("│ ").split()) > 3


def test_the_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["--help"])

    text = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 success, 1 a bug in Phalanx, 2 wrong command line" in text
    assert "130 interrupted" in text


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "a.toml", "--no-such-option"], ["bench"]])
def test_a_wrong_command_line_exits_2(arguments: list[str]) -> None:
    assert run_command(arguments) == 2


def test_train_passes_its_options_on_and_prints_figures_and_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = {"status": "completed", "loss_last": 2.5, "evicted": ["worker-1"], "run_dir": str(tmp_path)}
    recorder = install(monkeypatch, Recorder(summary))

    options = ["--set", "a.b=1", "--unset", "d.e", "--set", "c=x", "--run-dir", "runs/x", "--resume"]
    code = run_command(["train", "run.toml", *options])

    assert code == 0
    assert recorder.calls == [
        ("load_run", Path("run.toml"), ("d.e-", "a.b=1", "c=x")),
        ("train", "the run", Path("runs/x"), True),
        ("write_report", tmp_path),
    ]
    out = capsys.readouterr().out
    assert "loss_last  2.5" in out
    assert f"report: {tmp_path}/report.html" in out


@pytest.mark.parametrize(("known", "shown"), [(None, False), (0, False), (3, True)])
def test_figures_of_a_drill_are_shown_where_there_was_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: int | None, shown: bool
) -> None:
    drill = dict.fromkeys(("attacks_injected", "detections", "false_accusations"), known)
    install(monkeypatch, Recorder({"status": "completed", "run_dir": "runs/x", "loss_last": None, **drill}))

    assert run_command(["train", "run.toml"]) == 0

    out = capsys.readouterr().out
    assert ("attacks_injected" in out) is shown
    assert ("detections" in out) is shown
    # what was not measured is no row
    assert "loss_last" not in out


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 6), ("interrupted", 130)])
def test_the_exit_code_of_train_is_that_of_its_status(monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    install(monkeypatch, Recorder({"status": status, "run_dir": "runs/x"}))

    assert run_command(["train", "run.toml"]) == code


def test_a_rank_that_is_not_the_first_follows_and_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch, Recorder())
    recorder.is_rank = True

    assert run_command(["train", "run.toml"]) == 0

    assert [call[0] for call in recorder.calls] == ["load_run", "follow"]


def test_a_dry_run_describes_and_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = install(monkeypatch, Recorder())

    assert run_command(["train", "run.toml", "--dry-run"]) == 0

    assert "described: the run" in capsys.readouterr().out
    assert [call[0] for call in recorder.calls] == ["load_run"]


@pytest.mark.parametrize(
    "error",
    [value for value in vars(errors).values() if isinstance(value, type)],
    ids=lambda error: error.__name__,
)
def test_each_error_becomes_one_clean_message_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[errors.PhalanxError]
) -> None:
    install(monkeypatch, Recorder(fault=error("mesh: needs [red]12[/red] ranks, got 8; lower dp to 2")))

    code = run_command(["train", "run.toml"])

    assert code == error.exit_code != 0
    said = "error: mesh: needs [red]12[/red] ranks, got 8; lower dp to 2"
    assert capsys.readouterr().err == f"{said} [{error.code}]\n"


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Recorder(fault=KeyboardInterrupt()))

    assert run_command(["train", "run.toml"]) == 130


def test_a_bug_shows_a_plain_traceback_without_values_and_exits_1() -> None:
    code = """
import sys, types
from pathlib import Path
from phalanx.cli import main

def write_report(run_dir):
    secret = "hunter" + str(2)
    raise RuntimeError("a bug")

sys.modules["phalanx.report"] = types.SimpleNamespace(write_report=write_report, check_run=lambda run_dir: None)
sys.argv[1:] = ["report", "runs/x"]
main()
"""

    result = python(code)

    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.rstrip().endswith("RuntimeError: a bug")
    assert "hunter2" not in result.stderr


def test_report_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Recorder())

    assert run_command(["report", "runs/x"]) == 0

    assert capsys.readouterr().out == "runs/x/report.html\n"


def test_bench_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = install(monkeypatch, Recorder())

    assert run_command(["bench", "pipeline"]) == 0

    out = capsys.readouterr().out
    assert recorder.calls == [("bench", False)]
    assert "guarded_full" in out
    assert "12.35" in out


def test_bench_json_is_one_object_on_stdout_and_in_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorder = install(monkeypatch, Recorder())
    out = tmp_path / "results" / "pipeline.json"

    assert run_command(["bench", "pipeline", "--quick", "--json", "--out", str(out)]) == 0

    assert recorder.calls == [("bench", True)]
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["rows"][1]["tokens_per_s"] == 12.345


def test_an_unknown_bench_names_the_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Recorder())

    assert run_command(["bench", "pipelin"]) == 2

    assert capsys.readouterr().err == "error: bench: unknown name 'pipelin'; choices: pipeline [PHX-C002]\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0

    assert capsys.readouterr().out.startswith("phalanx 0.")


def test_a_command_ends_without_a_last_search_for_cycles(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["phalanx", "--version"])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        frozen, is_enabled = gc.get_freeze_count(), gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()

    assert ended.value.code == 0
    assert frozen > 10_000 and not is_enabled
