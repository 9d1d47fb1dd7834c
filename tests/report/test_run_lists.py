"""Lists of runs, and runs side by side: what is listed, what differs, and what exceeds noise."""

import json
import math
import random
from datetime import date

import pytest

from phalanx.cli import run_command
from phalanx.errors import InputError
from phalanx.report.compare import compare_runs, write_comparison
from phalanx.report.run_list import RunFilter, list_runs, parse_day

DAY = 86_400
BEGUN = 1_790_000_000


def write_run(
    home, name, *, shift=0.0, seed=3, lr=0.01, state="completed", begun=BEGUN, steps=160, draw=0, sections=""
):
    """A run with made-up figures; runs of one `draw` have seen the same batches with the same noise of each."""
    path = home / name
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    model = '[model]\nfrom_scratch = true\n[model.architecture]\nmodel_type = "gpt2"\nn_layer = 4\nn_embd = 32\n'
    (path / "config.toml").write_text(
        f"{model}[train]\nseed = {seed}\nsteps = {steps}\n[optimizer]\nlr = {lr}\n{sections}"
    )
    batches, own = random.Random(draw), random.Random(name)
    loss = 0.0
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            loss = 4.0 + math.exp(-step / 30) + batches.gauss(0, 0.2) + own.gauss(0, 0.01) + shift
            row = {"step": step, "time": begun + step, "loss": loss, "samples_digest": f"{draw}-{step}"}
            file.write(
                json.dumps({**row, "validation_perplexity": math.exp(4 + shift) if step % 40 == 39 else None}) + "\n"
            )
    if state != "unfinished":
        summary = {"status": state, "steps": steps, "loss_last": loss, "validation_perplexity": math.exp(4 + shift)}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_a_list_has_the_latest_run_first_and_what_its_files_say(tmp_path):
    write_run(tmp_path, "first")
    write_run(tmp_path, "search/0001", begun=BEGUN + DAY, state="unfinished", sections="[parallel]\ndp = 1\n")

    rows = list_runs(tmp_path)

    assert [row.directory for row in rows] == ["search/0001", "first"]
    assert (rows[0].state, rows[0].engine, rows[0].steps) == ("unfinished", "parallel", 160)
    assert (rows[1].state, rows[1].engine, rows[1].model) == ("completed", "pipeline", "gpt2 4x32")
    assert rows[1].loss == pytest.approx(4.0)
    assert rows[1].begun == "2026-09-21T14:13:20"


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (RunFilter(state="failed"), ["b"]),
        (RunFilter(engine="parallel"), []),
        (RunFilter(model="GPT2"), ["b", "a"]),
        (RunFilter(model="llama"), []),
        (RunFilter(max_loss=4.1), ["a"]),
        (RunFilter(since=date(2026, 9, 22)), ["b"]),
        (RunFilter(until=date(2026, 9, 21)), ["a"]),
        (RunFilter(state="failed", max_loss=4.1), []),
    ],
)
def test_filters_leave_out_what_is_not_asked_for(tmp_path, wanted, names):
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", begun=BEGUN + DAY, state="failed", shift=0.5)

    assert [row.directory for row in list_runs(tmp_path, wanted)] == names


def test_broken_files_and_links_end_no_list(tmp_path):
    write_run(tmp_path, "a")
    hostile = write_run(tmp_path, "b")
    (hostile / "summary.json").write_text('{"status": "\\u001b[2J", "validation_perplexity": 1e999}')
    (hostile / "config.toml").write_text("model = 3\n[train")
    (hostile / "metrics.jsonl").write_text('{"step": 1e400}\n{"step": 0, "time": -1e300}\nnot json\n')
    (tmp_path / "loop").symlink_to(tmp_path)

    rows = {row.directory: row for row in list_runs(tmp_path)}

    assert set(rows) == {"a", "b"}
    assert (rows["b"].state, rows["b"].model, rows["b"].loss, rows["b"].begun) == ("unfinished", "", None, "")


def test_a_directory_or_a_date_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        list_runs(tmp_path / "gone")
    with pytest.raises(InputError, match="2026-11-29"):
        parse_day("yesterday")


def differences_of(*paths):
    return {(row.figure, row.run): row for row in compare_runs(paths).differences}


def test_settings_that_differ_are_shown_and_no_others(tmp_path):
    compared = compare_runs([write_run(tmp_path, "a"), write_run(tmp_path, "b", lr=0.02)])

    assert compared.settings == {"optimizer.lr": (0.01, 0.02)}
    assert compared.figures["status"] == ("completed", "completed")


@pytest.mark.parametrize(("shift", "verdict"), [(0.1, "exceeds noise"), (0.0005, "within noise")])
def test_training_losses_on_the_same_batches_are_compared_step_by_step(tmp_path, shift, verdict):
    """The noise of a batch, 0.2, is in both runs: what is left is the noise of a run, 0.01."""
    found = differences_of(write_run(tmp_path, "a"), write_run(tmp_path, "b", lr=0.02, shift=shift))

    row = found["training loss, last quarter", "b"]
    assert (row.verdict, row.basis) == (verdict, "8 blocks of 5 steps")
    assert row.difference == pytest.approx(shift, abs=0.01)


def test_training_losses_on_other_batches_or_few_steps_have_no_noise(tmp_path):
    found = differences_of(
        write_run(tmp_path, "a"),
        write_run(tmp_path, "b", draw=1, shift=1.0),
        write_run(tmp_path, "c", steps=20, shift=1.0),
    )

    assert found["training loss, last quarter", "b"].verdict == "noise not known"
    assert found["training loss, last quarter", "b"].basis == "other batches"
    assert found["training loss, last quarter", "c"].basis == "few steps"


def test_a_validation_figure_needs_several_seeds_to_exceed_noise(tmp_path):
    runs = [write_run(tmp_path, "a"), write_run(tmp_path, "b", lr=0.02, shift=0.3)]
    assert differences_of(*runs)["log of validation_perplexity", "b"].verdict == "noise not known"

    seeds = [write_run(tmp_path, f"seed-{seed}", seed=seed, shift=0.01 * seed, draw=seed) for seed in (4, 5)]
    found = differences_of(*runs, *seeds)

    row = found["log of validation_perplexity", "b"]
    assert row.verdict == "exceeds noise"
    # 0, 0.04 and 0.05 against 0.3
    assert row.difference == pytest.approx(0.27)
    spread = math.sqrt((0.03**2 + 0.01**2 + 0.02**2) / 2)
    # with 2 degrees of freedom, chance alone makes 2 standard errors in 18 % of comparisons, and so many in 5 %
    assert row.noise == pytest.approx(4.303 * spread * math.sqrt(1 / 3 + 1), rel=1e-3)
    # runs that differ in their seed alone are no two things to compare
    assert ("log of validation_perplexity", "seed-4") not in found


def test_one_run_too_many_runs_or_the_same_run_twice_are_refused(tmp_path):
    run = write_run(tmp_path, "a")
    for runs in ([run], [run] * 7, [run, run]):
        with pytest.raises(InputError, match=r"give 2 to 6|given twice"):
            compare_runs(runs)


def test_the_page_opens_offline_and_escapes_what_files_say(tmp_path):
    hostile = write_run(tmp_path, "b", lr=0.02)
    (hostile / "summary.json").write_text(json.dumps({"status": "<script>alert(1)</script>\u202e"}))
    compared = compare_runs([write_run(tmp_path, "a"), hostile])

    page = write_comparison(compared, tmp_path / "page.html").read_text()

    assert "<script" not in page and "\u202e" not in page and "src=" not in page
    assert page.count("<svg") == 2 and "optimizer.lr" in page


def test_the_commands_print_tables_and_one_object(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", "a")
    write_run(tmp_path / "runs", "b", lr=0.02, shift=0.1)

    assert run_command(["runs"]) == 0
    assert "gpt2 4x32" in capsys.readouterr().out
    assert run_command(["runs", "--json", "--max-loss", "4.05"]) == 0
    assert [row["directory"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["a"]
    assert run_command(["compare", "runs/a", "runs/b"]) == 0
    assert "exceeds noise" in capsys.readouterr().out
    assert run_command(["compare", "runs/a", "runs/b", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["settings"] == {"optimizer.lr": [0.01, 0.02]} and answer["page"] == "compare.html"
    assert run_command(["runs", "--state", "gone"]) == 3
    assert run_command(["runs", "gone"]) == 3
    assert run_command(["compare", "runs/a"]) == 3
