"""A run in Python's hands: one call trains it, it is a mapping, and a notebook shows its report."""

import html
import io
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import phalanx
from machine_patience import patience_s
from phalanx.errors import ConfigError, InputError
from phalanx.train import train as train_run


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_a_call_of_the_package_trains_a_file_and_gives_a_mapping_of_its_summary(run_file, tmp_path, console):
    run = phalanx.train(run_file, tmp_path / "run", console=console)

    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert run == run.summary == saved
    assert json.loads(json.dumps(run)) == saved
    assert (type(run), run["status"], run.directory) == (phalanx.Run, "completed", tmp_path / "run")
    assert phalanx.open_run(tmp_path / "run") == run
    assert "step 6/6" in console.file.getvalue()
    # what other code of ours calls stays a function with a plain summary
    assert type(train_run(phalanx.load_run(run_file), tmp_path / "run", resume=True, console=console)) is dict


@pytest.fixture
def run(trained_once):
    return phalanx.open_run(trained_once[1])


def test_its_metrics_are_rows_and_columns(run):
    rows, columns = run.metrics(), run.columns()

    assert [row["step"] for row in rows] == columns["step"] == [0, 1, 2, 3, 4, 5]
    assert columns["loss"] == [row["loss"] for row in rows]
    validated = {row["step"]: row["validation_perplexity"] for row in rows if "validation_perplexity" in row}
    assert len(columns["validation_perplexity"]) == len(rows)
    assert [columns["validation_perplexity"][step] for step in validated] == list(validated.values())


def test_its_metrics_are_a_frame_where_pandas_is(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    assert run.frame() == ("frame", run.columns())

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="needs pandas; install it, or take metrics"):
        run.frame()


def test_a_notebook_shows_the_very_report_in_a_frame_without_scripts(run):
    shown = run._repr_html_()

    (page,) = re.findall(r'srcdoc="([^"]*)"', shown)
    assert html.unescape(page) == run.report().read_text()
    assert re.sub(r'srcdoc="[^"]*"', "", shown).startswith('<iframe title="Report of run"  sandbox width="100%"')


def test_text_of_a_run_does_not_break_out_of_the_frame(trained_once, tmp_path):
    directory = tmp_path / 'a"><script>x'
    directory.mkdir()
    (directory / "run.json").write_text("{}")
    (directory / "summary.json").write_text(json.dumps({"status": '"><script>alert(1)</script>'}))

    shown = phalanx.open_run(directory)._repr_html_()

    assert "<script" not in shown
    assert shown.count("<") == 2


def test_a_run_without_a_summary_is_an_empty_mapping_and_has_its_rows(trained_once, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    run = phalanx.open_run(tmp_path)
    assert (run, run.metrics(), run.columns()) == ({}, [], {})

    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.5}\n{"step": 1, "lo')
    assert run.metrics() == [{"step": 0, "loss": 2.5}]


@pytest.mark.parametrize(("summary", "said"), [("{", "cannot be read"), ("[]", "found a list, expected an object")])
def test_what_is_no_run_is_refused(tmp_path, summary, said):
    with pytest.raises(InputError, match="is no run directory; expected one that"):
        phalanx.open_run(tmp_path)

    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(InputError, match=rf"summary\.json: {said}.*--resume writes it anew"):
        phalanx.open_run(tmp_path)


def test_to_import_the_package_and_to_open_a_run_loads_no_torch(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code = (
        "import sys, phalanx; phalanx.load_run; assert callable(phalanx.train);"
        f"phalanx.open_run({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


SCRIPT = """
import sys
import phalanx

run = phalanx.train(sys.argv[1], sys.argv[2])
print("ran", __name__, run["status"], run["world"]["processes"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a script", "-c", "standard input"])
def test_a_script_without_a_main_guard_trains_with_worker_processes(run_file, tmp_path, way):
    run_file.write_text(run_file.read_text().replace("stages = 2", "stages = 3\nspares = 1"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first = {"a script": [str(script)], "-c": ["-c", SCRIPT], "standard input": ["-"]}[way]

    done = subprocess.run(
        [sys.executable, *first, str(run_file), str(tmp_path / "run")],
        input=SCRIPT if way == "standard input" else "",
        capture_output=True,
        text=True,
        check=False,
        timeout=patience_s(280.0),
    )

    assert (done.returncode, done.stdout.count("ran __main__ completed 3")) == (0, 1), done.stderr
