"""Train a tiny run with a liar and make the passport that tests of forgeries change.

    PYTHONPATH=src:tests python scripts/passport_vectors.py tests/vectors/passport

Its owner's keys are published beside it, so that tests can forge what an owner could; they are of this run alone.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from phalanx.cli.outcome import run_command
from phalanx.data import BpeConfig
from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SourceFacts,
    TokenizerRecord,
    document_digest,
    fingerprint_of,
    load_signer,
)
from phalanx.data.tokenizers.training import train_bpe
from phalanx.security.crypto import load_identity
from tiny_run_file import tiny_run_file

TEXTS = [f"the hoplite number {n} holds {n * n} shields and {n + 7} spears" for n in range(40)]
LIAR = """
[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 0.25
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false

[checkpoint]
every = 3
journal = false

[attack]
kind = "forward_sign_flip"
stages = [1]
rate = 1.0
from_step = 2
"""


def write_dataset(home: Path, signer_file: Path, texts: list[str] = TEXTS) -> str:
    """Write a dataset of two sources; return the fingerprint of its signer."""
    signer = load_signer(signer_file)
    tokenizer = train_bpe(iter(TEXTS), BpeConfig(vocab_size=280))
    content = tokenizer.to_json()
    with DatasetWriter(home, "<u2", 500, 256) as writer:
        for number, text in enumerate(texts):
            (ids,) = tokenizer.encode_texts([text])
            entry = DocumentEntry(document_digest(text), number % 2, f"hoplite/{TEXTS.index(text)}")
            split = "validation" if TEXTS.index(text) % 5 == 4 else "train"
            writer.part_writer("odd" if number % 2 else "even", split).add_document(
                np.array([*ids, tokenizer.eos_id]), entry
            )
        facts = DatasetFacts(
            sources=(
                SourceFacts(name="free", kind="text", fingerprint="1" * 64, licence="CC0-1.0"),
                SourceFacts(name="bought", kind="text", fingerprint="2" * 64, licence="own licence"),
            ),
            tokenizer=TokenizerRecord(
                kind="bpe",
                vocab_size=tokenizer.vocab_size,
                eos_id=tokenizer.eos_id,
                digest=hashlib.sha256(content).hexdigest(),
            ),
            recipe=RecipeRecord.from_content("made\n"),
        )
        writer.finish_dataset(facts, signer)
    (home / "tokenizer.json").write_bytes(content)
    return fingerprint_of(signer)


def run_file(dataset: str, signer: str, sections: str = LIAR, steps: int = 6) -> str:
    """Return the run file; the path of the dataset stands in the passport, so it is a relative one."""
    text = tiny_run_file(sections, steps=steps, validate_every=3)
    made = 'sources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\n'
    text = text.replace(made, f'dataset = {{ path = "{dataset}", signer = "{signer}" }}\n')
    text = text.replace("validation_share = 0.2\nmax_documents = 12\n", "")
    return text.replace("vocab_size = 300", "vocab_size = 280").replace("n_embd = 32", "n_embd = 16")


def call(*words: str) -> None:
    """Run a command of phalanx."""
    code = run_command([*words])
    if code not in (0, 7):
        raise SystemExit(f"{' '.join(words)}: exit code {code}")


def make_vector(out: Path) -> None:
    """Train, evaluate, attack and write the passport, in a folder of its own."""
    signer = write_dataset(Path("hoplites"), Path("signer.key").absolute())
    Path("run.toml").write_text(run_file("hoplites", signer), encoding="utf-8")
    Path("notes.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    call("train", "run.toml", "--run-dir", "run")
    call("checkpoint", "export", "run", "model")
    call("eval", "model", "--text", "notes=notes.txt", "--out", "run/evaluation.json")
    call(
        "redteam",
        "run",
        "--attacks",
        "membership_loss,membership_zlib",
        "--no-controls",
        "--out",
        "run/redteam",
        "--rows",
        "16",
    )
    call("passport", "run", "--model", "model", "--out", "small.passport", "--document", "hoplite/7")
    for name in ("small.passport", "model"):
        target = out / name
        if target.is_dir():
            shutil.rmtree(target)
        (shutil.copytree if Path(name).is_dir() else shutil.copyfile)(name, target)
    owner = load_identity(Path("run/pki/owner"))
    keys = {"signing_key": owner.signing_key.private_bytes_raw().hex(), "release_key": owner.tls_key_pem.decode()}
    (out / "owner.json").write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the vector into the folder that is named."""
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="passport-vector-") as scratch:
        os.environ |= {"XDG_CONFIG_HOME": scratch, "PHALANX_CACHE": f"{scratch}/cache"}
        os.chdir(scratch)
        make_vector(out)


if __name__ == "__main__":
    main()
