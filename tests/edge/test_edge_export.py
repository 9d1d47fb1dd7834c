"""What is exported is opened by a runtime of others and compared; what differs does not appear."""

import importlib.util
import json

import pytest

from phalanx.cli import run_command as command_line
from phalanx.edge import CheckSizes, export, export_edge, gguf_file
from phalanx.errors import CheckpointError, ConfigError
from tiny_edge_models import byte_tokenizer, write_model

SMALL = CheckSizes(num_texts=150, num_prompts=2, num_tokens=6, num_scored=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("edge") / "llama")


def verdicts(result) -> dict[str, str]:
    return {row.check: row.verdict for row in result.rows}


def test_llama_cpp_reads_the_file_as_we_read_the_model(model, tmp_path):
    result = export_edge(model, tmp_path / "out", "gguf", "f32", sizes=SMALL)

    assert result.state == "checked"
    assert "xllamacpp" in result.runtime
    assert set(verdicts(result).values()) <= {"equal", "within bound", "noted"}
    table = json.loads((tmp_path / "out" / "differences.json").read_text())
    assert table["files"].keys() == {"model.gguf"}
    assert [row["check"] for row in table["differences"]] == list(verdicts(result))


def test_a_file_with_wrong_numbers_is_refused_and_does_not_appear(model, tmp_path, monkeypatch):
    # rotary pairs as transformers has them: everything loads, and computes something else
    family = gguf_file.GGUF_FAMILIES["llama"]
    wrong = type(family)(family.architecture, family.activation)
    monkeypatch.setitem(gguf_file.GGUF_FAMILIES, "llama", wrong)

    result = export_edge(model, tmp_path / "out", "gguf", "f32", sizes=SMALL)

    assert result.state == "refused"
    assert verdicts(result)["perplexity, reference text"] == "beyond bound"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cuts_texts_otherwise_is_refused(tmp_path, monkeypatch):
    directory = write_model(tmp_path / "model", tokenizer=byte_tokenizer(split_digits=True))
    monkeypatch.setitem(export_edge.__globals__, "write_gguf", _with_pre("gpt-2"))

    result = export_edge(directory, tmp_path / "out", "gguf", "f32", sizes=SMALL)

    assert verdicts(result)["tokenizer: special tokens read"] == "beyond bound"
    assert not (tmp_path / "out").exists()


def _with_pre(name):
    def write(directory, path, precision):
        from gguf import GGUFWriter

        original = GGUFWriter.add_tokenizer_pre
        GGUFWriter.add_tokenizer_pre = lambda self, _pre: original(self, name)
        try:
            return gguf_file.write_gguf(directory, path, precision)
        finally:
            GGUFWriter.add_tokenizer_pre = original

    return write


@pytest.mark.parametrize("kind", ["gguf", "onnx"])
def test_without_the_runtime_the_table_names_every_check_that_is_missing(model, tmp_path, monkeypatch, kind, capsys):
    package = {"gguf": "xllamacpp", "onnx": "onnxruntime_genai"}[kind]
    real = importlib.util.find_spec
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == package else real(name))
    monkeypatch.setattr(
        export, "write_onnx", lambda _directory, out, _precision: (out / "model.onnx").write_bytes(b"x")
    )

    code = command_line(["export", str(model), str(tmp_path / "out"), "--format", kind, "--json"])

    facts = json.loads(capsys.readouterr().out)
    assert code == 7
    assert facts["state"] == "not checked by an independent runtime"
    missing = [row["check"] for row in facts["differences"] if row["verdict"] == "not checked"]
    assert missing == ["tokenizer", "begin of text", "chat template", "perplexity", "greedy answers", "refusals"]
    assert (tmp_path / "out").is_dir()


def test_no_check_is_said_in_the_file(model, tmp_path, capsys):
    assert command_line(["export", str(model), str(tmp_path / "out"), "--no-check"]) == 0

    assert "not checked by an independent runtime" in capsys.readouterr().out
    assert "not checked" in json.loads((tmp_path / "out" / "differences.json").read_text())["state"]


def test_nothing_is_overwritten_and_unknown_precisions_list_the_choices(model, tmp_path):
    with pytest.raises(CheckpointError, match="already exists"):
        export_edge(model, tmp_path, "gguf", "f32", sizes=None)
    with pytest.raises(ConfigError, match="q4_0"):
        export_edge(model, tmp_path / "out", "gguf", "int4", sizes=None)
    with pytest.raises(ConfigError, match="onnx"):
        export_edge(model, tmp_path / "out", "tflite", "f32", sizes=None)
