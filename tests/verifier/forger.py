"""A passport in the hands of a forger: of an outsider, who has no key, and of the owner, who can sign anything anew."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.governance.passport import hash_members, write_bundle
from phalanx.governance.statements import ReleaseSigner
from phalanx.security.crypto import Identity
from phalanx.verifier.bundle import BLOCK, SEAL, make_header, read_bundle
from phalanx.verifier.forms import canonical, digest, in_domain, merkle_root, sha256

VECTOR = Path(__file__).parents[1] / "vectors" / "passport"
SMALL, MODEL = VECTOR / "small.passport", VECTOR / "model"


def load_owner(certificate: bytes, authority: bytes) -> Identity:
    """Return the owner of the vector; its certificate may have ended."""
    keys = json.loads((VECTOR / "owner.json").read_text())
    signing_key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(keys["signing_key"]))
    return Identity("owner", signing_key, keys["release_key"].encode(), certificate, authority)


def payload_of(envelope: bytes) -> dict[str, Any]:
    return json.loads(base64.b64decode(json.loads(envelope)["payload"]))


class Forger:
    """The members of the vector, to be changed, and written with the old seal or sealed anew by the owner."""

    def __init__(self) -> None:
        self.members = {name: member.read_all() for name, member in read_bundle(SMALL).items()}
        self.seal = self.members.pop(SEAL)
        self.facts = payload_of(self.seal)["predicate"]
        self.owner = load_owner(self.members["certificates/owner.pem"], self.members["certificates/authority.pem"])
        self.signer = ReleaseSigner(self.owner)

    def write_with_old_seal(self, path: Path) -> Path:
        write_bundle(path, self.members, self.seal)
        return path

    def write_sealed(self, path: Path) -> Path:
        write_bundle(path, self.members, self.signer.seal_members(hash_members(self.members), self.facts))
        return path

    def change_statement(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change an in-toto statement and sign it with the owner's release key."""
        statement = payload_of(self.members[name])
        change(statement)
        self.members[name] = self.signer.sign_statement(
            statement["subject"], statement["predicateType"], statement["predicate"]
        )

    def change_json(self, name: str, change: Callable[[Any], None]) -> None:
        value = json.loads(self.members[name])
        change(value)
        self.members[name] = canonical(value)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.members["log/events.jsonl"].splitlines()]

    def leaves_of(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        body = line["body"]
        data = self.members["log/steps.jsonl"][body["offset"] : body["offset"] + body["size_bytes"]]
        return [json.loads(row) for row in data.splitlines()]

    def write_log(
        self,
        lines: list[dict[str, Any]],
        change_leaves: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda leaves: leaves,
    ) -> None:
        """Write the log anew, signed, chained and with roots; the seal then names its new end."""
        rows, leaves, offset, digests = [], [], 0, []
        previous = digest(in_domain("log-start/1", lines[0]["run"].encode()))
        for number, line in enumerate(lines):
            if line["kind"] == "step":
                texts = [canonical(leaf) for leaf in change_leaves(self.leaves_of(line))]
                size = sum(len(text) + 1 for text in texts)
                place = {"offset": offset, "size_bytes": size, "leaves": len(texts), "root": merkle_root(texts)}
                line["body"] = {**line["body"], **place}
                leaves += texts
                offset += size
            if line["kind"] == "checkpoint_saved":
                self._rewrite_manifest(line["body"], digests)
            fresh = {key: value for key, value in line.items() if key != "signature"}
            fresh |= {"sequence": number, "previous": previous}
            signature = self.owner.sign_data(in_domain("log/1", canonical(fresh))).hex()
            rows.append(canonical({**fresh, "signature": signature}))
            previous = digest(rows[-1])
            digests.append(previous)
        self.members["log/events.jsonl"] = b"".join(row + b"\n" for row in rows)
        self.members["log/steps.jsonl"] = b"".join(leaf + b"\n" for leaf in leaves)
        self.facts["log"] = {"num_events": len(rows), "digest": previous}

    def _rewrite_manifest(self, body: dict[str, Any], digests: list[str]) -> None:
        """Let the manifest of a checkpoint know the new lines before it."""
        name = f"checkpoints/step-{body['step']:08}.json"
        if name in self.members:
            manifest = json.loads(self.members[name])["body"]
            count = min(manifest["audit_log"]["num_events"], len(digests))
            manifest["audit_log"] = {"num_events": count, "digest": digests[count - 1]}
            self.members[name] = self.sign_manifest(manifest)
            body["manifest"] = sha256(self.members[name])

    def sign_manifest(self, body: dict[str, Any]) -> bytes:
        signature = self.owner.sign_data(in_domain("checkpoint-manifest/1", canonical(body)))
        signer = self.owner.public.public_key.hex()
        return canonical({"body": body, "signature": signature.hex(), "signer": signer})


def raw_bundle(members: list[tuple[str, bytes]], behind: bytes = b"") -> bytes:
    """Return a tar file of members in this order."""
    parts = [make_header(name, len(data)) + data + b"\0" * (-len(data) % BLOCK) for name, data in members]
    return b"".join(parts) + b"\0" * 2 * BLOCK + behind
