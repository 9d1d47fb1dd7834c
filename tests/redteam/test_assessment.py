"""An attack that was not judged is never a pass, gates hold, and no answer of a model can steer a report."""

import json
import sys

import pytest

from phalanx.cli import run_command
from phalanx.errors import ConfigError, InputError, ModelError, TransportError
from phalanx.redteam import assessment
from phalanx.redteam.assessment import attack_model, choose_attacks, failed_gates, open_controls
from phalanx.redteam.control import PROMPT_CONTROLS
from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.garak import GarakRow, read_garak_rows, run_garak
from phalanx.redteam.prompted import PROMPTED
from phalanx.redteam.report import render_findings, render_markdown, write_report
from phalanx.redteam.table import ATTACKS_ON_MODELS, ModelAttackEntry
from phalanx.redteam.target import Target

LOST = Score(0.2, (0.1, 0.3), 0.5, 10, "AUC")
WON = Score(0.9, (0.8, 1.0), 0.5, 10, "AUC")
HOSTILE = "\x1b[2J`</code><script>alert(1)</script>`\u202e | [x](javascript:1)"


def test_an_attack_that_fails_its_own_control_is_not_judged():
    assert AttackFinding("x", LOST, control=WON).outcome == "not found"
    assert AttackFinding("x", WON, control=WON).outcome == "found"
    assert AttackFinding("x", LOST, control=LOST).outcome == "not judged"
    assert "control" in AttackFinding("x", LOST, control=LOST).why_not
    assert AttackFinding("x", reason="needs data").to_json()["outcome"] == "not judged"


def test_every_entry_of_the_table_has_its_own_name_and_says_what_it_needs():
    assert all(entry.attack.name == name and entry.attack.needs for name, entry in ATTACKS_ON_MODELS.items())


def test_slow_attacks_run_only_where_they_are_named():
    assert "membership_lira" not in choose_attacks([])
    assert choose_attacks(["membership_lira"]) == ["membership_lira"]
    with pytest.raises(ConfigError, match="choices: membership_loss"):
        choose_attacks(["hope"])


def test_a_target_that_lacks_everything_is_judged_by_nothing():
    findings = attack_model(Target("nothing"), [], None)

    assert {finding.outcome for finding in findings} == {"not judged"}
    assert all(finding.reason.startswith("needs ") for finding in findings)


def test_prompts_are_judged_beside_their_control():
    with open_controls(True) as controls:
        findings = attack_model(PROMPT_CONTROLS["refusing"], list(PROMPTED), controls)

    assert {finding.outcome for finding in findings} == {"not found"}
    assert all(finding.control.is_found for finding in findings)


class Breaking:
    """Ends with an error of ours."""

    name, needs = "breaking", ("chat",)

    def run(self, target):
        raise ModelError("the weights are damaged")


def test_an_attack_that_ends_with_an_error_is_not_judged(monkeypatch):
    monkeypatch.setattr(assessment, "ATTACKS_ON_MODELS", {"breaking": ModelAttackEntry(Breaking(), "prompts", "?")})

    (finding,) = attack_model(PROMPT_CONTROLS["obedient"], ["breaking"], None)

    assert (finding.outcome, finding.reason) == ("not judged", "the weights are damaged")


@pytest.mark.parametrize(
    "gate", ["extraction", "extraction=much", "hope=0.1", "=1", "extraction=inf", "extraction=nan"]
)
def test_a_gate_of_another_form_is_refused(gate, tmp_path, capsys):
    assert run_command(["redteam", str(tmp_path), "--fail-above", gate]) == 2
    assert "neither a run" not in capsys.readouterr().err


def test_a_gate_that_is_given_twice_is_refused(tmp_path, capsys):
    gates = ["--fail-above", "extraction=0.1", "--fail-above", "extraction=0.9"]

    assert run_command(["redteam", str(tmp_path), *gates]) == 2
    assert "given twice" in capsys.readouterr().err


def test_gates_fail_above_their_score_and_where_nothing_was_judged():
    findings = [AttackFinding("extraction", WON), AttackFinding("jailbreak", reason="needs a chat template")]
    nan = [AttackFinding("extraction", Score(float("nan"), (0.0, 1.0), 0.0, 1, "share"))]

    assert failed_gates(findings, {"extraction": 0.9}) == ([], [])
    assert failed_gates(findings, {"extraction": 0.5})[0] == ["extraction: 0.9 is above 0.5"]
    assert failed_gates(findings, {"jailbreak": 1.0})[1] == ["jailbreak: was not judged (needs a chat template)"]
    assert failed_gates(findings, {"injection": 1.0})[1] == ["injection: was not judged (not run)"]
    assert failed_gates(nan, {"extraction": 0.5})[0]


def test_what_a_model_wrote_steers_neither_terminal_nor_page(tmp_path):
    findings = [AttackFinding("extraction", WON, (HOSTILE,), "It leaks.")]

    shown, markdown = render_findings(findings), render_markdown("runs/x", findings)
    page = write_report(tmp_path / "out", "runs/x", {"findings": []}, findings).read_text()

    assert "\x1b" not in shown + markdown + page
    assert "\u202e" not in shown + markdown + page
    assert "<script" not in markdown + page
    assert "[x]" not in markdown.replace("\\[", "")
    assert markdown.count("`") == 2
    assert "Content-Security-Policy" in page
    assert (tmp_path / "out" / "redteam.json").exists()


def eval_line(**counts):
    return json.dumps({"entry_type": "eval", "probe": "dan.Dan", "detector": "mitigation", **counts})


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (eval_line(passed=3, total=5), (3, 2, 0)),
        (eval_line(passed=3, fails=1, nones=4, total_evaluated=4), (3, 1, 4)),
        (eval_line(passed=0, fails=0, nones=6, total_evaluated=0), (0, 0, 6)),
        (eval_line(passed=2, fails=1, total_evaluated=3, total_processed=7), (2, 1, 4)),
    ],
)
def test_what_garak_did_not_judge_is_a_column_and_never_a_pass(line, row):
    (found,) = read_garak_rows(['{"entry_type": "attempt"}', line])

    assert (found.passed, found.failed, found.unjudged) == row
    assert ("not judged" in found.cells[-1]) is (row[0] + row[1] == 0)
    assert "not judged" in GarakRow.HEADS


@pytest.mark.parametrize("line", ["{", eval_line(passed="x"), eval_line(), '["eval"]'])
def test_a_malformed_report_of_garak_is_refused(line):
    with pytest.raises(TransportError, match="line 1"):
        read_garak_rows([line])


def environment(tmp_path, body):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{body}")
    python.chmod(0o755)
    return tmp_path / "venv"


WRITES = """
import json, os, sys
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
settings = json.load(open(options["--generator_option_file"]))["rest"]["RestGenerator"]
assert settings["uri"] == "http://127.0.0.1:9/v1/chat/completions", settings
assert os.environ["REST_API_KEY"] == "secret" and "PYTHONPATH" not in os.environ
line = {"entry_type": "eval", "probe": "a", "detector": "b", "passed": 1, "fails": 2, "nones": 3}
open(options["--report_prefix"] + ".report.jsonl", "w").write(json.dumps(line))
"""


def test_garak_runs_from_its_own_environment_by_path(tmp_path):
    rows = run_garak(environment(tmp_path, WRITES), "http://127.0.0.1:9", "default", "secret", ["dan"])

    assert rows == [GarakRow("a", "b", 1, 2, 3), GarakRow("dan", "", 0, 0, 0)]
    assert rows[1].cells[-1] == "not judged"


@pytest.mark.parametrize("others", [("report.hitlog.jsonl",), ("report.avid.jsonl", "report.hitlog.jsonl")])
def test_the_list_of_hits_beside_a_report_is_not_taken_for_it(tmp_path, others):
    """garak writes its hits into a file of their own, and only where there are any."""
    hits = "".join(
        f'\nopen(os.path.join(os.path.dirname(options["--report_prefix"]), {name!r}), "w")' for name in others
    )

    rows = run_garak(environment(tmp_path, WRITES + hits), "http://127.0.0.1:9", "default", "secret", ["a"])

    assert rows == [GarakRow("a", "b", 1, 2, 3)]


def test_a_report_without_an_evaluation_passes_nothing(tmp_path):
    empty = WRITES.replace('"entry_type": "eval"', '"entry_type": "attempt"')

    rows = run_garak(environment(tmp_path, empty), "http://127.0.0.1:9", "default", "secret", ["a", "dan.Dan"])

    assert rows == [GarakRow("a", "", 0, 0, 0), GarakRow("dan.Dan", "", 0, 0, 0)]


def test_garak_that_fails_or_is_not_there_is_no_pass(tmp_path):
    with pytest.raises(InputError, match="bin/python"):
        run_garak(tmp_path, "http://127.0.0.1:9", "default", "")
    with pytest.raises(TransportError, match="ended with 3"):
        run_garak(environment(tmp_path, "import sys; sys.exit(3)"), "http://127.0.0.1:9", "default", "")


def test_no_attack_is_lost_to_a_garak_that_fails(tmp_path, capsys):
    python = environment(tmp_path, "import sys; sys.exit(3)")
    command = ["redteam", "http://127.0.0.1:9", "--attacks", "jailbreak", "--no-controls", "--with-garak", str(python)]

    assert run_command(command) == 4
    error = capsys.readouterr().err
    assert "garak: ended with 3" in error
    assert "redteam: jailbreak" not in error


def test_the_command_refuses_gates_and_attacks_that_there_are_not(tmp_path, capsys):
    assert run_command(["redteam", str(tmp_path), "--attacks", "hope"]) == 2
    assert run_command(["redteam", str(tmp_path), "--fail-above", "extraction"]) == 2
    assert run_command(["redteam", str(tmp_path), "--with-garak", str(tmp_path)]) == 2
    assert run_command(["redteam", str(tmp_path), "--attacks", "jailbreak"]) == 3
    assert "neither a run" in capsys.readouterr().err


def test_a_gate_decides_the_exit_code_of_the_command(undefended, tmp_path, capsys):
    texts = {name: tmp_path / f"{name}.jsonl" for name in ("members", "strangers")}
    for name, path in texts.items():
        rows = getattr(undefended, name).rows[:12]
        path.write_text("".join(json.dumps({"text": undefended.decode(row)}) + "\n" for row in rows))
    command = ["redteam", str(undefended.directory), "--attacks", "membership_loss", "--no-controls", "--json"]
    command += [word for name, path in texts.items() for word in (f"--{name}", str(path))]

    assert run_command([*command, "--out", str(tmp_path / "report")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counts"] == {"found": 1, "not found": 0, "not judged": 0}
    assert json.loads((tmp_path / "report" / "redteam.json").read_text())["target"] == str(undefended.directory)
    assert run_command([*command, "--fail-above", "membership_loss=0.9"]) == 5
    assert run_command([*command, "--fail-above", "extraction=0.9"]) == 7
    assert "<script" not in (tmp_path / "report" / "redteam.html").read_text()
