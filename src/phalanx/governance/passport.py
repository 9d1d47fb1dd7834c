"""Make the passport of a run: collect its files, state them in the formats of others, and seal all of it."""

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exported import digest_model
from phalanx.checkpoint.manifest import MANIFEST_FILE, list_checkpoints
from phalanx.config.text import parse_strict_json
from phalanx.data.shards import SealKey, open_dataset
from phalanx.data.shards.lookup import find_document
from phalanx.data.shards.proof import prove_document
from phalanx.errors import CertificateError, CheckpointError, ConfigError, DataError, InputError, VerificationError
from phalanx.evaluate import read_result
from phalanx.governance.bill_of_materials import make_bill
from phalanx.governance.forms.facts import learning_type
from phalanx.governance.statements import (
    BuildFacts,
    MeasuredTests,
    ModelFiles,
    ReleaseSigner,
    make_provenance,
    make_test_result,
)
from phalanx.models.directory import read_config
from phalanx.security.crypto import load_identity
from phalanx.serve import TextModel
from phalanx.train import PastRun, export_run, verify_run_export
from phalanx.train.records.lineage import dataset_of
from phalanx.verifier import passport as form
from phalanx.verifier.bundle import BLOCK, SEAL, make_header
from phalanx.verifier.forms import Member, RefusedError
from phalanx.verifier.kinds import EXPORT_FILE
from phalanx.verifier.log import LogFindings, read_owner, read_summary_head, verify_log
from phalanx.verifier.passport import PassportFindings, verify_passport
from phalanx.verifier.shards import SignedManifest, read_manifest
from phalanx.verifier.statement import digest_weights

_PARTS = ("torch", "transformers", "safetensors", "cryptography", "blake3")
_README = """A passport of a training run: statements that are signed by its owner and checked against each other.

Check it offline:              phalanx-verify run.passport --owner FINGERPRINT --model DIR
Unpack it:                     tar xf run.passport
model/model.sig                OMS v1.0 model signature; model_signing verify key reads it
provenance.dsse.json           SLSA provenance v1 of the training, with the whole run file
tests/                         in-toto test results: evaluations, red-team reports
bom.cdx.json                   CycloneDX 1.7 bill of materials: model card, composition of the data
data/dataset.json              signed manifest of the data
lineage/                       proofs about documents
log/                           the signed audit log and the leaves of every step
checkpoints/, evidence/        manifests that the log certifies; evidence of its verdicts, without tensors
exports/                       signed statements of files for other runtimes
seal.dsse.json                 digest of every member, signed with the key of the log

The owner's word alone: what no statement of another party covers. phalanx-verify lists these facts as remarks.
"""


@dataclass(frozen=True)
class PassportChoice:
    """What a passport is made from beside the run.

    Attributes:
        model: Directory of the model that is handed over; None exports the newest checkpoint.
        identity: Directory of the owner's keys; None takes the run's own.
        evaluations: Results of ``phalanx eval --out``.
        redteams: Reports of ``phalanx redteam --out``: directories, or their JSON files.
        exports: Directories of ``phalanx export``.
        documents: Documents to prove the place of, or the absence.
    """

    model: Path | None = None
    identity: Path | None = None
    evaluations: Sequence[Path] = ()
    redteams: Sequence[Path] = ()
    exports: Sequence[Path] = ()
    documents: Sequence[str] = ()


def make_passport(past: PastRun, out: Path, choice: PassportChoice) -> PassportFindings:
    """Write the passport of a run to a new file, and return the findings of a stranger.

    Raises:
        ConfigError: There is such a file, or a statement is about something else than the run.
        CertificateError: The owner's keys are not here, or are another owner's.
        VerificationError: The run's own files do not hold together.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists; name a new file")
    try:
        maker = _PassportMaker(past, choice)
        with tempfile.TemporaryDirectory(prefix="phalanx-passport-") as scratch:
            members, facts = maker.collect_members(Path(scratch))
        # nothing half is left beside the new file by a full disk or Ctrl-C
        with tempfile.TemporaryDirectory(prefix=".phalanx-passport-", dir=out.parent) as scratch:
            bundle = Path(scratch) / "bundle"
            write_bundle(bundle, members, maker.signer.seal_members(hash_members(members), facts))
            # what this program would not believe must not leave the house
            findings = verify_passport(bundle, past.owner.public_key.hex())
            bundle.replace(out)
    except RefusedError as exc:
        raise VerificationError(f"{past.path}: no passport: {exc}") from exc
    except OSError as exc:
        raise InputError(f"{out}: cannot be written ({exc.strerror})") from exc
    return findings


class _PassportMaker:
    def __init__(self, past: PastRun, choice: PassportChoice) -> None:
        self._past, self._choice = past, choice
        home = choice.identity or (Path(past.config.pki) if past.config.pki else past.path / "pki") / "owner"
        owner = load_identity(home)
        if owner.public != past.owner:
            raise CertificateError(f"{home}: holds the keys of another owner than the run's")
        self._owner, self.signer = owner, ReleaseSigner(owner)
        self._members: dict[str, bytes] = {
            form.OWNER_FILE: owner.certificate_pem,
            form.AUTHORITY_FILE: owner.authority_pem,
            form.README_FILE: _README.encode(),
        }

    def collect_members(self, scratch: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Return the members but the seal, and the predicate of the seal."""
        log = self._collect_log()
        manifest = self._collect_data()
        model = self._collect_model(scratch, log, manifest)
        self._collect_files(log)
        facts = {
            "run": log.run,
            "status": "completed" if log.is_completed else "unfinished",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "software": importlib.metadata.version("phalanx-train"),
            "log": {"num_events": len(log.lines), "digest": log.last_digest},
            "weights": log.weights,
            "audits": {"recorded": len(log.recorded), "proven": len(log.proven), "signed": log.audits},
            "draws": form.list_draws(log),
            "corpora": sorted({str(session["corpus"]) for session in log.sessions if "corpus" in session}),
            "verdicts": form.list_verdicts(log),
            "dataset": None if manifest is None else manifest.digest,
            "model": model,
        }
        return self._members, facts

    def _collect_log(self) -> LogFindings:
        path = self._past.path
        names = {form.EVENTS_FILE: path / "events.jsonl", form.LEAVES_FILE: path / "steps.jsonl"}
        present = {name: Member.from_file(file) for name, file in names.items() if file.exists()}
        self._members |= {name: member.read_all(2**34) for name, member in present.items()}
        owner = read_owner(self._owner.certificate_pem.decode("ascii"))
        return verify_log(present[form.EVENTS_FILE], present.get(form.LEAVES_FILE), owner, read_summary_head(path))

    def _collect_data(self) -> SignedManifest | None:
        try:
            path, named = dataset_of(self._past)
        except DataError:
            if self._choice.documents:
                raise
            return None
        content = (path / "dataset.json").read_bytes()
        self._members[form.MANIFEST_MEMBER] = content
        key = None if named.key_file is None else SealKey.from_file(named.key_file)
        for document in self._choice.documents:
            dataset = open_dataset(path, named.signer, key)
            proof = prove_document(dataset, find_document(dataset, document).digest)
            self._members[f"{form.LINEAGE}{proof.digest}.proof.json"] = proof.to_bytes()
        return read_manifest(content)

    def _collect_model(self, scratch: Path, log: LogFindings, manifest: SignedManifest | None) -> dict[str, Any] | None:
        past, directory = self._past, self._choice.model
        if not log.certified:
            return None
        step = max(log.certified)
        if directory is None:
            directory = scratch / "model"
            step = export_run(past, directory)
        is_adapter = (directory / "adapter_model.safetensors").is_file()
        is_whole = is_adapter == (past.config.model.adapter is not None)
        if is_whole and past.final_weights_digest is not None:
            weights = verify_run_export(past, directory)
        else:
            # a classifier has other names than a model of its family
            is_classifier = past.config.data.labelled is not None
            weights = digest_weights(directory) if is_adapter or is_classifier else digest_model(directory)
        files = ModelFiles.from_directory(directory, directory.resolve().name)
        self._members[form.SIGNATURE_MEMBER] = self.signer.sign_model(files)
        self._members[form.PROVENANCE_FILE] = make_provenance(self.signer, files, self._build_facts(manifest))
        tests = [*self._read_evaluations(directory, weights), *self._read_redteams(directory, weights)]
        for result in tests:
            self._add_member(f"{form.TESTS}{result.name}", make_test_result(self.signer, files, log.run, result))
        versions = {name: importlib.metadata.version(name) for name in _PARTS}
        versions["phalanx"] = importlib.metadata.version("phalanx-train")
        architecture = {} if is_adapter else read_config(directory)
        self._members[form.BOM_FILE] = make_bill(
            files, architecture, learning_type(past.config), manifest, tests, versions
        )
        return {
            "name": files.name,
            "root": files.root,
            "step": step,
            "weights": weights,
            "is_whole": is_whole,
            "has_plain_names": digest_weights(directory) == weights,
        }

    def _build_facts(self, manifest: SignedManifest | None) -> BuildFacts:
        past = self._past
        lines = self._members[form.EVENTS_FILE].splitlines()
        first, last = (json.loads(row) for row in (lines[0], lines[-1]))
        config = past.config.model_dump(mode="json")
        dependencies = {} if manifest is None else {"training data": manifest.digest}
        dependencies |= {
            f"code {path.name}": _hash_bytes(path.read_bytes()) for path in sorted(past.path.glob("code/*.py"))
        }
        guard = config.get("guard") or {}
        return BuildFacts(
            run=past.run_id,
            run_file=config,
            dependencies=dependencies,
            internal={"seed": past.config.train.seed, "classes": guard.get("classes")},
            times=(first["time"], last["time"]),
            software=importlib.metadata.version("phalanx-train"),
        )

    def _read_evaluations(self, model: Path, weights: str) -> list[MeasuredTests]:
        paths = [*self._choice.evaluations] or sorted(self._past.path.glob("evaluation*.json"))
        results = []
        for path in paths:
            result = read_result(path)
            digest = result.model.get("model_digest")
            if digest is not None and digest != TextModel(model).model_digest:
                raise ConfigError(f"{path}: was measured on another model than {model}; evaluate the one you hand over")
            figures = {name: figure.value for name, figure in result.figures.items()}
            measured = [name for name, value in figures.items() if value is not None]
            results.append(
                MeasuredTests(
                    name=_plain_name(path.stem),
                    digest=_hash_bytes(path.read_bytes()),
                    weights=None if digest is None else weights,
                    figures={name: repr(figures[name]) for name in measured},
                    outcomes=(measured, sorted(set(figures) - set(measured)), []),
                )
            )
        return results

    def _read_redteams(self, model: Path, weights: str) -> list[MeasuredTests]:
        default = self._past.path / "redteam" / "redteam.json"
        paths = [path / "redteam.json" if path.is_dir() else path for path in self._choice.redteams]
        results = []
        for path in paths or ([default] if default.is_file() else []):
            report = _read_report(path)
            digest = report.get("model_digest")
            if digest is not None and digest != TextModel(model).model_digest:
                raise ConfigError(f"{path}: attacked another model than {model}; attack the one that you hand over")
            outcomes: dict[str, list[str]] = {"not found": [], "not judged": [], "found": []}
            for finding in report["findings"]:
                outcomes[finding["outcome"]].append(finding["attack"])
            scores = {row["attack"]: repr(row["score"]) for row in report["findings"] if row["score"] is not None}
            name = "redteam" if path.parent.name == "redteam" else _plain_name(f"redteam-{path.parent.name}")
            owned = None if digest is None else weights
            lists = (outcomes["not found"], outcomes["not judged"], outcomes["found"])
            results.append(MeasuredTests(name, _hash_bytes(path.read_bytes()), owned, scores, lists))
        return results

    def _collect_files(self, log: LogFindings) -> None:
        """Collect manifests that the log certifies, evidence that it names, and statements of exports."""
        path = self._past.path
        for step, directory in list_checkpoints(path / "checkpoints").items():
            if step in log.certified:
                self._members[f"{form.CHECKPOINTS}step-{step:08}.json"] = (directory / MANIFEST_FILE).read_bytes()
        for name in {str(body["evidence"]) for body in log.verdicts if body.get("evidence")}:
            if (path / name).is_file():
                self._members[name] = (path / name).read_bytes()
        for directory in self._choice.exports:
            file = directory / EXPORT_FILE
            if not file.is_file():
                raise CheckpointError(f"{file}: missing; export the model again to have a statement")
            self._add_member(f"{form.EXPORTS}{_plain_name(directory.resolve().name)}", file.read_bytes())

    def _add_member(self, name: str, statement: bytes) -> None:
        """Add a statement; a second one of the name would hide the first, such as a test that failed."""
        member = f"{name}.dsse.json"
        if member in self._members:
            raise ConfigError(f"two statements would have the name {member}; rename the file or directory of one")
        self._members[member] = statement


def _read_report(path: Path) -> Mapping[str, Any]:
    try:
        report = parse_strict_json(path.read_bytes())
        [(row["attack"], row["outcome"], row["score"]) for row in report["findings"]]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{path}: is no report of phalanx redteam ({exc})") from exc
    return dict(report)


def _plain_name(text: str) -> str:
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)[:60]


def _hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_bundle(path: Path, members: Mapping[str, bytes], seal: bytes) -> None:
    """Write a bundle; where it breaks off, a part of the file is left.

    Raises:
        OSError: The disk refuses.
    """
    with path.open("wb") as file:
        for name, content in [*sorted(members.items()), (SEAL, seal)]:
            file.write(make_header(name, len(content)) + content + b"\0" * (-len(content) % BLOCK))
        file.write(b"\0" * 2 * BLOCK)


def hash_members(members: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each member that is to be sealed, in the order of the bundle."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(members.items())}
