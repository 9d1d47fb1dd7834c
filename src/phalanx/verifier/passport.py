"""A passport: one bundle of statements about a run, each of which is checked by itself and against all others.

The attacker of a passport is whoever hands it over. Without the owner's keys nothing in it can be changed; with them,
nothing can be changed that workers have signed, that the log has certified before, or that two statements say. What the
owner alone knows stays the owner's word, and `PassportFindings.remarks` says which facts these are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bundle import SEAL, read_bundle
from .evidence import verify_evidence
from .forms import (
    CertifiedParty,
    Member,
    RefusedError,
    canonical,
    check_issuer,
    check_signatures,
    parse,
    read_json,
    require,
    sha256,
)
from .log import LogFindings, check_kept_head, read_owner, verify_log
from .shards import SignedManifest, check_proof, corpus_digest, read_manifest, source_corpus_digest
from .statement import (
    GIT_FILES,
    SIGNATURE_FILE,
    SLSA_PREDICATE,
    TEST_PREDICATE,
    ModelSignature,
    by_release_key,
    compare_model,
    digest_weights,
    list_log_keys,
    open_export,
    open_model_signature,
    open_statement,
)

PASSPORT_PREDICATE = "urn:phalanx:passport:1"
BUILD_TYPE = "urn:phalanx:training:1"
OWNER_FILE, AUTHORITY_FILE = "certificates/owner.pem", "certificates/authority.pem"
EVENTS_FILE, LEAVES_FILE = "log/events.jsonl", "log/steps.jsonl"
SIGNATURE_MEMBER, PROVENANCE_FILE, BOM_FILE = "model/model.sig", "provenance.dsse.json", "bom.cdx.json"
MANIFEST_MEMBER, README_FILE = "data/dataset.json", "readme.txt"
TESTS, CHECKPOINTS, EVIDENCE, EXPORTS, LINEAGE = "tests/", "checkpoints/", "evidence/", "exports/", "lineage/"
_FILES = {
    OWNER_FILE, AUTHORITY_FILE, EVENTS_FILE, LEAVES_FILE, SIGNATURE_MEMBER, PROVENANCE_FILE, BOM_FILE, MANIFEST_MEMBER,
    README_FILE, SEAL,
}  # fmt: skip
_FOLDERS = {TESTS: ".dsse.json", CHECKPOINTS: ".json", EVIDENCE: ".json", EXPORTS: ".dsse.json", LINEAGE: ".proof.json"}
_MALFORMED = (KeyError, TypeError, AttributeError, IndexError)
_SEAL_KEYS = {
    *("audits", "corpora", "dataset", "draws", "log", "model", "run", "software", "status", "time"),
    *("verdicts", "weights"),
}


@dataclass
class PassportFindings:
    """What a passport shows.

    Attributes:
        owner: Fingerprint of the owner's key, which signed log and seal.
        is_expected: Whether the caller named that key.
        rows: Results of all checks, by name, for people to read.
        remarks: Facts that hold and prove less than one may think.
        doubts: Missing facts, which a whole passport has.
        facts: The predicate of the seal; every entry that can be recomputed was.
    """

    owner: str
    is_expected: bool
    rows: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def verify_passport(
    path: Path,
    owner: str | None = None,
    certificate_pem: str | None = None,
    model: Path | None = None,
    heads: Sequence[bytes] = (),
    absent: str | None = None,
) -> PassportFindings:
    """Check a passport offline.

    Args:
        owner: Fingerprint of the owner's key that you expect; None accepts any, and the result says so.
        certificate_pem: Certificate of the owner that you have kept.
        model: Directory of the model that you were given; it is compared with the passport.
        heads: Heads of the log that others have kept; without them an owner can write another history.
        absent: Digest of a document that the model must never have seen: it is refused unless the passport shows that.

    Raises:
        RefusedError: Something does not hold; the message names the member.
        UnreadableError: The file, or the model, cannot be read.
    """
    try:
        return _PassportReader(read_bundle(path), owner, certificate_pem).check_members(model, heads, absent)
    except _MALFORMED as exc:
        raise RefusedError(f"the passport is malformed: {exc!r:.200}") from exc


class _PassportReader:
    def __init__(self, members: Mapping[str, Member], owner: str | None, certificate_pem: str | None) -> None:
        self._members = members
        for name in members:
            is_known = name in _FILES or any(
                name.startswith(folder) and name.endswith(suffix) for folder, suffix in _FOLDERS.items()
            )
            require(is_known, f"member {name} is none of a passport")
        for name in (OWNER_FILE, AUTHORITY_FILE, EVENTS_FILE):
            require(name in members, f"member {name} is missing")
        self._owner = self._read_owner(owner, certificate_pem)
        is_expected = owner is not None or certificate_pem is not None
        self._findings = PassportFindings(self._owner.fingerprint, is_expected)

    def _read_owner(self, expected: str | None, certificate_pem: str | None) -> CertifiedParty:
        with _in_member(OWNER_FILE):
            owner = read_owner(self._read_text(OWNER_FILE))
            check_issuer(owner, self._read_text(AUTHORITY_FILE))
            require(expected in (None, owner.fingerprint), f"the owner's key is {owner.fingerprint}, not {expected}")
            if certificate_pem is not None:
                pinned = read_owner(certificate_pem)
                pinned_keys = pinned.key, pinned.release_key, pinned.second_key
                is_same = pinned_keys == (owner.key, owner.release_key, owner.second_key)
                require(is_same, "the certificate is another one than yours")
        return owner

    def check_members(self, model: Path | None, heads: Sequence[bytes], absent: str | None) -> PassportFindings:
        """Check all members."""
        findings = self._findings
        self._seal = findings.facts = self._check_seal()
        self._log = self._check_log()
        self._check_heads(heads)
        self._signature = self._check_model(model)
        self._manifest = self._check_data()
        self._check_provenance()
        self._figures = self._check_tests()
        self._check_bom()
        self._check_checkpoints()
        self._check_evidence()
        self._check_exports()
        proven_absent = self._check_lineage()
        if absent is not None:
            self._require_absence(absent, proven_absent, is_compared=model is not None)
        if not findings.is_expected:
            findings.remarks.append(f"any owner could have made it: compare the key {findings.owner}")
        return findings

    def _read_text(self, name: str) -> str:
        return self._members[name].read_all(2**20).decode("ascii")

    def _read_data(self, name: str) -> bytes:
        return self._members[name].read_all(2**28)

    def _names_in(self, folder: str) -> list[str]:
        return [name for name in self._members if name.startswith(folder)]

    def _check_seal(self) -> dict[str, Any]:
        """Compare every member with the seal, which the log's own key signed."""
        with _in_member(SEAL):
            data = self._read_data(SEAL)
            signatures, checks = parse(data)["signatures"], list_log_keys(self._owner)
            # signatures cover the payload alone: the rest of the envelope has one form
            require(len(signatures) == len(checks), f"{len(signatures)} signatures, the owner has {len(checks)} keys")
            expected = [{"keyid": key, "sig": row["sig"]} for key, row in zip(checks, signatures, strict=True)]
            require(signatures == expected, "another key than the log's")
            statement = open_statement(data, [*checks.values()], PASSPORT_PREDICATE)
            require(set(parse(data)) == {"payload", "payloadType", "signatures"}, "other keys than those of a seal")
            sealed = [(subject["name"], subject["digest"]) for subject in statement["subject"]]
            require([name for name, _ in sealed] == [name for name in self._members if name != SEAL], "other members")
            for name, value in sealed:
                require(value == {"sha256": self._members[name].hash_content()}, f"member {name} was changed")
            predicate = statement["predicate"]
            require(set(predicate) == _SEAL_KEYS, "other keys than those of a passport")
        self._findings.rows["sealed members"] = str(len(sealed))
        return dict(predicate)

    def _check_log(self) -> LogFindings:
        seal, members = self._seal, self._members
        with _in_member(EVENTS_FILE):
            log = verify_log(members[EVENTS_FILE], members.get(LEAVES_FILE), self._owner)
            # the seal is of the same key as the log, and says where it ended
            log_end = {"num_events": len(log.lines), "digest": log.last_digest}
            require(seal["log"] == log_end, "the seal says that the log has another end")
            require(seal["run"] == log.run, "the seal is of another run")
            opening = log.sessions[-1] if log.sessions else {}
            require(opening.get("authority") in (None, self._read_text(AUTHORITY_FILE)), "has another authority")
            expected = {
                "weights": log.weights,
                "status": "completed" if log.is_completed else "unfinished",
                "audits": {"recorded": len(log.recorded), "proven": len(log.proven), "signed": log.audits},
                "draws": list_draws(log),
                "corpora": sorted({str(session["corpus"]) for session in log.sessions if "corpus" in session}),
                "verdicts": list_verdicts(log),
            }
            for name, value in expected.items():
                require(seal[name] == value, f"the seal says {name} {seal[name]!r:.120}, the log {value!r:.120}")
        findings = self._findings
        findings.rows["log"] = f"{len(log.lines)} lines, signed, in order; run {log.run}, {seal['status']}"
        findings.rows["audits"] = log.describe_audits()
        findings.doubts += [doubt for doubt in log.doubts if doubt != "lines may be missing at the end"]
        findings.remarks += log.remarks
        if not log.is_completed:
            findings.doubts.append("the run had not ended when the passport was made")
        findings.rows["convicted"] = ", ".join(sorted({str(body["party"]) for body in log.verdicts})) or "nobody"
        return log

    def _check_heads(self, heads: Sequence[bytes]) -> None:
        findings = self._findings
        with _in_member(EVENTS_FILE):
            findings.doubts += filter(None, [check_kept_head(head, self._log, self._owner) for head in heads])
        if heads:
            findings.rows["heads that others kept"] = f"{len(heads)}, all in the log"
        else:
            findings.remarks.append("that its owner wrote no other log is its word: give heads that others have kept")

    def _check_model(self, directory: Path | None) -> ModelSignature | None:
        """Check the signature of the model, and the weights where the model is at hand."""
        stated, findings = self._seal["model"], self._findings
        if SIGNATURE_MEMBER not in self._members:
            require(stated is None, f"member {SIGNATURE_MEMBER} is missing")
            require(directory is None, "the passport is of no model")
            findings.doubts.append("it has no signature of a model")
            return None
        with _in_member(SIGNATURE_MEMBER):
            signature = open_model_signature(self._read_data(SIGNATURE_MEMBER), self._owner.release_key)
            require(stated is not None and stated["root"] == signature.root, "is of another model than the seal says")
            require(stated["name"] == signature.name, "has another name than the seal says")
            others = {*signature.ignored} - {*GIT_FILES, SIGNATURE_FILE}
            require(not others, f"leaves files of the model unsigned: {sorted(others)[:5]}")
            step, weights = stated["step"], stated["weights"]
            require(step in self._log.manifests, f"is of step {step}, of which the log certifies no checkpoint")
            if step in self._log.recorded or not self._log.is_completed or step < max(self._log.manifests):
                findings.doubts.append(f"the model is of step {step}: the log signs the weights of the last step only")
            elif stated["is_whole"] or not self._run_file().get("model", {}).get("adapter"):
                require(weights == self._log.weights, "has other weights than the run ended with")
            else:
                findings.remarks.append("the model is merged or trained in part: that it has the run's weights is the "
                                        "owner's word")  # fmt: skip
        findings.rows["model"] = f"{signature.name}, step {step}, {len(signature.files)} files, root {signature.root}"
        if directory is None:
            findings.remarks.append("no model was compared: give the directory that you were handed")
            return signature
        compare_model(directory, signature)
        findings.remarks.append("that the model's config and tokenizer are the run's is the owner's word")
        if stated["has_plain_names"]:
            is_same = digest_weights(directory) == weights
            require(is_same, f"{directory}: the tensors are not those of the run")
            findings.rows["model's files"] = "as signed; tensors have the digest that the run signed at its end"
        else:
            findings.rows["model's files"] = "as signed"
            findings.doubts.append("its tensors have other names than the run's: `phalanx model verify` compares them")
        return signature

    def _check_data(self) -> SignedManifest | None:
        findings, corpora = self._findings, self._seal["corpora"]
        if MANIFEST_MEMBER not in self._members:
            require(self._seal["dataset"] is None, f"member {MANIFEST_MEMBER} is missing")
            findings.doubts.append("it has no manifest of the data")
            return None
        with _in_member(MANIFEST_MEMBER):
            manifest = read_manifest(self._read_data(MANIFEST_MEMBER))
            require(self._seal["dataset"] == manifest.digest, "is another dataset than the seal says")
        body = manifest.body
        findings.rows["data"] = f"{body['documents']} documents, {body['tokens']} tokens, signed by {manifest.signer}"
        data = self._run_file().get("data", {})
        packing, length = str(data.get("packing", "concatenate")), int(data.get("sequence_length", 0))
        corpus = corpus_digest(manifest.digest, packing, length)
        if not corpora:
            findings.doubts.append("the log names no training data")
        else:
            with _in_member(MANIFEST_MEMBER):
                is_described = corpora == [source_corpus_digest(body["files"], data)]
                require(corpora == [corpus] or is_described, f"gives the corpus {corpus}, but the log names {corpora}")
            findings.rows["data in the log"] = "every session drew from this dataset"
            if is_described:
                findings.doubts.append("that the data come from the sources in the log is their signer's word")
        return manifest

    def _provenance(self) -> dict[str, Any] | None:
        if PROVENANCE_FILE not in self._members:
            return None
        check = by_release_key(self._owner.release_key)
        with _in_member(PROVENANCE_FILE):
            return open_statement(self._read_data(PROVENANCE_FILE), [check], SLSA_PREDICATE)

    def _run_file(self) -> dict[str, Any]:
        """Return the run file, whose digest the log names."""
        statement = self._provenance()
        if statement is None:
            return {}
        with _in_member(PROVENANCE_FILE):
            run_file = statement["predicate"]["buildDefinition"]["externalParameters"]["run_file"]
            value = sha256(canonical(run_file))
            require(self._log.sessions[-1].get("config_digest") == value, "its run file is not the one in the log")
        return dict(run_file)

    def _check_provenance(self) -> None:
        statement = self._provenance()
        if statement is None:
            require(self._signature is None, f"member {PROVENANCE_FILE} is missing")
            return
        with _in_member(PROVENANCE_FILE):
            require(self._signature is not None, "is about a model that is not here")
            self._require_subject(statement, self._signature)
            build, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
            require(build["buildType"] == BUILD_TYPE, "is of another kind of build")
            require(run["metadata"]["invocationId"] == self._log.run, "is of another run")
            digests = [row["digest"].get("sha256") for row in build["resolvedDependencies"]]
            require(self._manifest is None or self._manifest.digest in digests, "was made from another dataset")
        self._findings.rows["provenance"] = f"SLSA v1, run file {sha256(canonical(self._run_file()))[:16]}... as logged"

    def _require_subject(self, statement: Mapping[str, Any], signature: ModelSignature | None) -> None:
        if signature is not None:
            root = [{"name": signature.name, "digest": {"sha256": signature.root}}]
            require(statement["subject"] == root, "is about another model")

    def _check_tests(self) -> dict[str, Any]:
        """Check results of evaluations and red-team reports; return the figures by name."""
        figures, results = dict[str, Any](), list[str]()
        for name in self._names_in(TESTS):
            with _in_member(name):
                check = by_release_key(self._owner.release_key)
                statement = open_statement(self._read_data(name), [check], TEST_PREDICATE)
                require(self._signature is not None, "is about a model that is not here")
                self._require_subject(statement, self._signature)
                predicate = statement["predicate"]
                notes = predicate["configuration"][0]["annotations"]
                require(name == f"{TESTS}{notes['kind']}.dsse.json", "has the name of another result")
                require(predicate["result"] == judge_tests(predicate), "its result is not that of its tests")
                require(notes["run"] == self._log.run, "is of another run")
                if notes["weights"] is None:
                    self._findings.remarks.append(f"{name}: that it is of this model is the owner's word")
                else:
                    require(notes["weights"] == self._seal["model"]["weights"], "was measured on other weights")
                figures.update({f"{notes['kind']}: {key}": value for key, value in notes["figures"].items()})
                results.append(f"{name.removeprefix(TESTS).removesuffix('.dsse.json')} {predicate['result']}")
        self._findings.remarks += ["that figures of tests are what was measured is the owner's word"] if results else []
        self._findings.rows["tests"] = ", ".join(results) or "none"
        return figures

    def _check_bom(self) -> None:
        if BOM_FILE not in self._members:
            require(self._signature is None, f"member {BOM_FILE} is missing")
            return
        with _in_member(BOM_FILE):
            bom = read_json(self._read_data(BOM_FILE))
            require((bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.7"), "is no CycloneDX 1.7")
            component = bom["metadata"]["component"]
            require(component["type"] == "machine-learning-model", "is about no model")
            root = None if self._signature is None else self._signature.root
            require(component["hashes"] == [{"alg": "SHA-256", "content": root}], "is about another model")
            metrics = component["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
            stated = {metric["type"]: metric["value"] for metric in metrics}
            require(stated == self._figures, "its figures are not those of the test results")
            if self._manifest is not None:
                self._check_composition(bom, self._manifest)
        parts = len(bom["components"])
        self._findings.rows["bill of materials"] = f"CycloneDX 1.7, {parts} parts, {len(stated)} figures"

    def _check_composition(self, bom: Mapping[str, Any], manifest: SignedManifest) -> None:
        """Compare the sources of the data with the signed manifest."""
        rows = {}
        for component in bom["components"]:
            notes = {note["name"]: note["value"] for note in component.get("properties", ())}
            if "phalanx:source" in notes:
                licences = component.get("licenses", [])
                licence = licences[0]["license"].get("id", licences[0]["license"].get("name")) if licences else ""
                counts = notes["phalanx:documents"], notes["phalanx:tokens"], notes["phalanx:share"]
                rows[int(notes["phalanx:source"])] = (component["name"], licence, *counts)
        require(rows == dict(enumerate(list_sources(manifest))), "its sources are not those of the dataset")

    def _check_checkpoints(self) -> None:
        """Compare manifests with the log: the newest that the log certifies must be there, and no older one for it."""
        log = self._log
        for name in self._names_in(CHECKPOINTS):
            with _in_member(name):
                data = self._read_data(name)
                body = (envelope := parse(data))["body"]
                keys = set(envelope) - {"ml_dsa_44"}
                require(keys == {"body", "signature", "signer"}, "has other keys than a manifest")
                require(envelope["signer"] == self._owner.fingerprint, "another key signed it")
                check_signatures(self._owner, envelope, "checkpoint-manifest/1", canonical(body))
                require(name == f"{CHECKPOINTS}step-{body['step']:08}.json", "has the name of another step")
                require(body["run"] == log.run, "is of another run")
                certified = log.certified.get(body["step"])
                require(certified == sha256(data), "is another one than the log certifies last for this step")
                head = body.get("audit_log")
                if head is not None:
                    number = head["num_events"]
                    is_there = number <= len(log.lines) and (not number or log.lines[number - 1] == head["digest"])
                    require(is_there, "knows lines that the log does not have")
        names = {f"{CHECKPOINTS}step-{step:08}.json" for step in log.certified}
        missing = names - set(self._names_in(CHECKPOINTS))
        if missing:
            self._findings.doubts.append(f"manifests that the log certifies are not here: {', '.join(sorted(missing))}")
        self._findings.rows["checkpoints"] = ", ".join(f"step {step}" for step in sorted(log.certified)) or "none"

    def _check_evidence(self) -> None:
        log, members, shown = self._log, self._members, []
        named = {str(body["evidence"]): body for body in log.verdicts if body.get("evidence")}
        for name in self._names_in(EVIDENCE):
            with _in_member(name):
                require(name in named, "no verdict of the log names it")
                data = self._read_data(name)
                require(sha256(data) == named[name].get("evidence_sha256"), "is another one than the log names")
                if read_json(data).get("format") != 3:
                    # of a text or an answer: the log names its digest, `phalanx audit explain` judges it
                    continue
                evidence = verify_evidence(data, None, self._read_text(AUTHORITY_FILE))
                is_session = evidence.session.startswith(f"{log.run}-")
                if len(log.session_names) == len(log.sessions):
                    is_session = evidence.session in log.session_names
                require(is_session, "is of another session than the log's")
                require(evidence.party == named[name]["party"], "accuses another party than the verdict")
                shown.append(f"{evidence.party}: {evidence.offence}, {len(evidence.signers)} signatures")
        missing = sorted(set(named) - set(members))
        if missing:
            self._findings.doubts.append(f"evidence that the log names is not here: {', '.join(missing)}")
        self._findings.rows["evidence"] = "; ".join(shown) or "none"

    def _check_exports(self) -> None:
        rows = []
        for name in self._names_in(EXPORTS):
            with _in_member(name):
                key, statement = open_export(self._read_data(name))
                source = statement["predicate"]["source"]
                require(source["run"] == self._log.run, "was made from another run")
                certified = self._log.manifests.get(source["step"], set())
                require(source["checkpoint"] in certified, "was made from a checkpoint that the log does not certify")
                stated = self._seal["model"]
                is_same = stated is None or source["step"] != stated["step"] or source["weights"] == stated["weights"]
                require(is_same, "was made from other weights")
                predicate = statement["predicate"]
                rows.append(f"{predicate['format']} {predicate['precision']}, {predicate['state']}, signed by {key}")
        self._findings.rows["exports"] = "; ".join(rows) or "none"

    def _check_lineage(self) -> set[str]:
        """Check the proofs about documents; return the digests that are proven not to be in the data."""
        rows, absent = [], set()
        for name in self._names_in(LINEAGE):
            with _in_member(name):
                require(self._manifest is not None, "its dataset is not here")
                proof = check_proof(self._read_data(name), None if self._manifest is None else self._manifest.signer)
                # its signer could sign another index of the same dataset, in which a document is missing
                is_same = self._manifest is not None and proof.statement == self._manifest.statement
                require(is_same, "is about another dataset, or another index of it")
                places = ", ".join(f"{group}.{split} {number}" for group, split, number in proof.places)
                rows.append(f"{proof.digest[:16]}... {places or 'is not in the data'}")
                absent |= set() if proof.places else {proof.digest}
        self._findings.rows["documents"] = "; ".join(rows) or "none"
        return absent

    def _require_absence(self, document: str, proven_absent: set[str], *, is_compared: bool) -> None:
        """Refuse weights that are not shown to have been trained without a document: changed ones, or on other data."""
        with _in_member("the document"):
            require(document in proven_absent, f"no member proves that {document} is not in the data")
            stated = self._seal["model"]
            is_shown = is_compared and bool(stated["is_whole"] and stated["has_plain_names"])
            require(is_shown, "that the model has the weights of this run is not shown; give the model itself")
        self._findings.rows["document never seen"] = f"{document}: by this run"
        if self._log.is_adopted or self._run_file().get("model", {}).get("from_scratch") is not True:
            self._findings.doubts.append("the run began with weights from elsewhere, which may have seen the document")


@contextmanager
def _in_member(name: str) -> Iterator[None]:
    """Name the member in everything that goes wrong within."""
    try:
        yield
    except (RefusedError, ValueError, *_MALFORMED) as exc:
        reason = str(exc) if isinstance(exc, RefusedError | ValueError) else f"malformed: {exc!r:.200}"
        raise RefusedError(f"{name}: {reason}") from exc


# --- what both ends compute: the maker of a passport calls these, and a verifier compares -------------------


def list_draws(log: LogFindings) -> list[dict[str, Any]]:
    """Return commitment, nonce and whether the key is told, of each guarded session."""
    keys = {"line": "line", "commitment": "audit_key_commitment", "nonce": "audit_nonce", "revealed": "revealed"}
    sessions = [session for session in log.sessions if session.get("audit_key_commitment") is not None]
    return [{name: session.get(key) for name, key in keys.items()} for session in sessions]


def list_verdicts(log: LogFindings) -> list[dict[str, Any]]:
    """Return who was convicted, of what and by which evidence."""
    names = ("party", "offence", "step", "evidence", "evidence_sha256")
    return [{name: body.get(name) for name in names} for body in log.verdicts]


def list_sources(manifest: SignedManifest) -> list[tuple[str, str, str, str, str]]:
    """Return name, licence, documents, tokens and share of each source, in the order of the manifest."""
    total = manifest.body["tokens"] or 1
    return [
        (row["name"], row["licence"], str(row["documents"]), str(row["tokens"]), f"{row['tokens'] / total:.6f}")
        for row in manifest.body["sources"]
    ]


def judge_tests(predicate: Mapping[str, Any]) -> str:
    """Return the result of a list of tests: the worst of them."""
    if predicate["failedTests"]:
        return "FAILED"
    return "WARNED" if predicate["warnedTests"] else "PASSED"
