"""The bench of exports keeps each finished row, and records what a runtime cannot run."""

from types import SimpleNamespace

import pytest

from phalanx.edge import CheckSizes, export_edge
from phalanx.errors import ModelError
from phalanx.lab.bench.serving import export
from tiny_edge_models import write_model


@pytest.fixture
def one_export(tmp_path, monkeypatch):
    """The bench with a tiny model, one export, and few texts."""
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(export, "open_model", lambda *_: SimpleNamespace(directory=model))
    monkeypatch.setattr(export, "_QUICK_EXPORTS", (("gguf", "q8_0"),))

    def export_little(*arguments, sizes):
        assert sizes.num_texts == CheckSizes().num_texts
        return export_edge(*arguments, sizes=CheckSizes(50, 2, 4, 30))

    monkeypatch.setattr(export, "export_edge", export_little)


def fail(*_, **__):
    raise ModelError("there: the runtime that checks it, asked to complete, says: no memory")


def test_a_finished_row_is_not_measured_again(one_export, monkeypatch):
    assert export.bench_export(True, True)["missing"] == 1
    first = export.bench_export(True)
    monkeypatch.setattr(export, "export_edge", fail)

    second = export.bench_export(True)

    assert first["missing"] == 0
    assert {row["state"] for row in first["rows"]} == {"checked"}
    assert first["rows"][0]["check"].startswith("weights between rounding borders")
    assert second["rows"] == first["rows"] == export.bench_export(True, True)["rows"]


def test_what_a_runtime_cannot_run_is_a_row(one_export, monkeypatch):
    monkeypatch.setattr(export, "export_edge", fail)

    (row,) = export.bench_export(True)["rows"]

    assert (row["check"], row["after"], row["state"]) == ("the runtime answers", False, "refused")
    assert row["bound"] == "no memory"
