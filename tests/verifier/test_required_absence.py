"""A reader who requires that a model has never seen a document: what a passport must show for it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forger import MODEL, SMALL, Forger

from phalanx.cli.outcome import run_command
from phalanx.verifier.__main__ import main
from phalanx.verifier.bundle import read_bundle
from phalanx.verifier.forms import RefusedError
from phalanx.verifier.passport import _PassportReader

DOCUMENT = "ab" * 32


def read_passport() -> _PassportReader:
    reader = _PassportReader(read_bundle(SMALL), None, None)
    reader.check_members(MODEL, (), None)
    return reader


def test_a_passport_without_a_proof_of_absence_or_with_one_of_presence_is_refused() -> None:
    (name,) = [name for name in Forger().members if name.startswith("lineage/")]
    present = name.removeprefix("lineage/").removesuffix(".proof.json")
    words = [str(SMALL), "--model", str(MODEL), "--absent"]

    assert main([str(SMALL), "--model", str(MODEL)]) == 0
    for document in (present, DOCUMENT):
        assert main([*words, document]) == 5
        assert run_command(["verify", *words, document]) == 5


def test_a_model_must_be_compared_and_have_the_weights_of_the_run() -> None:
    reader = read_passport()
    reader._require_absence(DOCUMENT, {DOCUMENT}, is_compared=True)
    with pytest.raises(RefusedError, match="give the model itself"):
        reader._require_absence(DOCUMENT, {DOCUMENT}, is_compared=False)

    for fact in ("is_whole", "has_plain_names"):
        reader = read_passport()
        reader._seal["model"][fact] = False
        with pytest.raises(RefusedError, match="is not shown"):
            reader._require_absence(DOCUMENT, {DOCUMENT}, is_compared=True)


def test_a_run_that_began_with_weights_from_elsewhere_leaves_a_doubt() -> None:
    reader = read_passport()
    reader._log.is_adopted = False
    reader._require_absence(DOCUMENT, {DOCUMENT}, is_compared=True)
    assert not reader._findings.doubts
    assert reader._findings.rows["document never seen"] == f"{DOCUMENT}: by this run"

    reader._log.is_adopted = True
    reader._require_absence(DOCUMENT, {DOCUMENT}, is_compared=True)
    assert any("weights from elsewhere" in doubt for doubt in reader._findings.doubts)


def test_nothing_but_a_passport_can_show_it(tmp_path: Path) -> None:
    (tmp_path / "statement.dsse.json").write_text("{}")

    assert main([str(tmp_path), "--absent", DOCUMENT]) == 5
    assert main([str(tmp_path / "statement.dsse.json"), "--absent", DOCUMENT]) == 5


def test_the_log_tells_that_a_run_began_with_a_checkpoint_of_another(tmp_path: Path) -> None:
    assert not read_passport()._log.is_adopted
    forger = Forger()
    first, *rest = forger.lines
    forger.write_log([first, {**first, "kind": "adopted", "body": {"run": "old", "step": 3}}, *rest])
    reader = _PassportReader(read_bundle(forger.write_sealed(tmp_path / "passport")), None, None)

    reader._seal = reader._check_seal()

    assert reader._check_log().is_adopted
