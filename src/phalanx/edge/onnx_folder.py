"""A model directory as a folder of ONNX, by the builder that comes with onnxruntime-genai."""

import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from phalanx.child import PythonProcess
from phalanx.data.chat import model_template
from phalanx.errors import ModelError
from phalanx.models.directory import read_config
from phalanx.models.hub_files import architecture_of

ONNX_PRECISIONS = ("fp32", "fp16", "int8", "int4")
_BUILDER = "onnxruntime_genai.models.builder"
_TIMEOUT_S = 3600.0
_BLOCK = 32


def write_onnx(directory: Path, out: Path, precision: str) -> None:
    """Write graph, weights, tokenizer, template and settings; matrices are 8 or 4 bits in blocks of 32 where asked for.

    The builder runs in a process of its own, without network.

    Raises:
        ModelError: The builder is missing, or does not know the family; its last words are in the text.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnxruntime_genai", "onnx_ir")):
        raise ModelError(
            "--format onnx: needs onnxruntime-genai and onnx-ir, of which one is not installed; install "
            "phalanx-train[onnx]"
        )
    with tempfile.TemporaryDirectory(prefix="phalanx-onnx-") as scratch:
        log = Path(scratch) / "builder.log"
        source = _name_architecture(directory, Path(scratch))
        command = [_BUILDER, "-i", str(source.resolve()), "-o", str(out.resolve()), "-p", precision, "-e", "cpu"]
        command += ["-c", scratch, "--extra_options", "hf_token=false", *_rounding_options(precision)]
        process = PythonProcess(command, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}, log)
        try:
            code = process.wait(_TIMEOUT_S)
        finally:
            process.kill()
        if code != 0 or not (out / "model.onnx").is_file():
            raise ModelError(f"{directory}: onnxruntime-genai's builder makes no ONNX of it: {process.last_output()}")
    _drop_wrong_shapes(out / "model.onnx")
    template = model_template(directory)
    if template is not None:
        # transformers leaves out one that is in none of the files that it looks for
        (out / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    # transformers may write another spelling of the same tokenizer; the file that was trained with is the one
    shutil.copyfile(directory / "tokenizer.json", out / "tokenizer.json")


def _drop_wrong_shapes(path: Path) -> None:
    """Remove wrong shapes of keys and values from a graph that repeats them, as the builder does in float16.

    The builder gives them the length of the new tokens instead of that of all tokens; onnxruntime then reuses buffers
    that are too small, and ends at the second token.
    """
    import onnx_ir  # noqa: PLC0415 - an extra

    model = onnx_ir.load(path)
    repeated = [value for node in model.graph for value in node.outputs if "/repeat_kv/" in (value.name or "")]
    for value in repeated:
        value.shape = None
    if repeated:
        onnx_ir.save(model, path)


def describe_onnx(precision: str) -> dict[str, str | int]:
    """Return program and settings that `write_onnx` rounds by, as a statement holds them."""
    tool = f"{_BUILDER} {importlib.metadata.version('onnxruntime-genai')}"
    return {"tool": tool, "matrices": precision, "options": " ".join(_rounding_options(precision))}


def _rounding_options(precision: str) -> list[str]:
    return [f"block_size={_BLOCK}"] if precision in ("int4", "int8") else []


def _name_architecture(directory: Path, scratch: Path) -> Path:
    """Return a directory whose config names its class, by which the builder goes: this one, or one of links to it."""
    config = read_config(directory)
    if config.get("architectures"):
        return directory
    try:
        name = architecture_of(str(config.get("model_type")))
    except KeyError as exc:
        raise ModelError(
            f"{directory / 'config.json'}: architectures: missing, and the builder goes by it; add the name of "
            "transformers' class"
        ) from exc
    named = scratch / "model"
    named.mkdir()
    for path in directory.iterdir():
        (named / path.name).symlink_to(path.resolve())
    (named / "config.json").unlink()
    (named / "config.json").write_text(json.dumps({**config, "architectures": [name]}), encoding="utf-8")
    return named
