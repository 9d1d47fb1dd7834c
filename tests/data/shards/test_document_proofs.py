"""A proof says where a document is in a dataset, or that it is nowhere; nothing that was altered proves anything."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from made_dataset import FACTS, entry_of, ids_of, make_dataset
from phalanx.config import canonical_json
from phalanx.data.shards import DatasetWriter, DocumentEntry, SealKey, fingerprint_of, open_dataset
from phalanx.data.shards.proof import DocumentPlace, _document_place, check_proof, prove_document, read_proof
from phalanx.errors import DataError
from phalanx.security.crypto import Identity

SIGNER = Identity.without_certificate("signer")


def checked(dataset, digest: str):
    content = prove_document(dataset, digest).to_bytes()
    return check_proof(read_proof(content, "proof"), "proof", fingerprint_of(SIGNER))


@pytest.mark.parametrize("sealed", [False, True])
def test_every_document_is_proven_to_be_where_it_is(tmp_path: Path, *, sealed: bool) -> None:
    key = SealKey.create_file(tmp_path / "key") if sealed else None
    make_dataset(tmp_path / "d", 60, SIGNER, seal=key)
    dataset = open_dataset(tmp_path / "d", key=key)

    for group, splits in dataset.groups.items():
        for split in splits:
            starts = dataset.document_starts(group, split)
            for number, entry in enumerate(dataset.document_entries(group, split)):
                found = checked(dataset, entry.digest)
                tokens = int(starts[number + 1] - starts[number])
                place = DocumentPlace(group, split, entry.source, number, int(starts[number]), tokens)
                assert found.places == (place,)
                assert found.is_complete


@pytest.mark.parametrize("documents", [1, 2, 2500])
def test_absence_is_proven_before_between_and_behind_all_documents(tmp_path: Path, documents: int) -> None:
    with DatasetWriter(tmp_path, "<u2", leaf_bytes=4096) as writer:
        for number in range(documents):
            writer.part_writer("web", "train").add_document(np.array([1]), entry_of(number))
        writer.finish_dataset(FACTS, SIGNER)
    dataset = open_dataset(tmp_path)

    for digest in ("0" * 64, "f" * 64, *(entry_of(documents + more).digest for more in range(20))):
        found = checked(dataset, digest)
        assert (found.places, found.is_complete) == ((), True)
    if documents > 1024:
        digests = sorted(entry_of(number).digest for number in range(documents))
        for number in (0, 1023, 1024, 2047, 2048, documents - 1):
            assert len(checked(dataset, digests[number]).places) == 1
            after = f"{int(digests[number], 16) + 1:064x}"
            assert checked(dataset, after).places == ()


def test_all_places_of_a_document_are_proven_and_of_very_many_that_there_are_more(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, "<u2", leaf_bytes=4096) as writer:
        for number in range(7):
            entry = DocumentEntry(entry_of(number % 2).digest, 0, str(number))
            writer.part_writer("web", ("train", "validation")[number > 4]).add_document(ids_of(number), entry)
        for number in range(300):
            writer.part_writer("again", "train").add_document(np.array([1]), DocumentEntry("aa" * 32, 0, str(number)))
        writer.finish_dataset(FACTS, SIGNER)
    dataset = open_dataset(tmp_path)

    found, many = checked(dataset, entry_of(0).digest), checked(dataset, "aa" * 32)

    assert [(one.split, one.document) for one in found.places] == [
        *(("train", 0), ("train", 2), ("train", 4)),
        ("validation", 1),
    ]
    assert found.is_complete
    assert (len(many.places), many.is_complete) == (257, False)


def test_a_proof_of_another_signer_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, 60, SIGNER)
    proof = prove_document(open_dataset(tmp_path), entry_of(3).digest)

    with pytest.raises(DataError, match=f"signed with key {fingerprint_of(SIGNER)}, expected {'0' * 64}"):
        check_proof(proof, "proof", "0" * 64)


def alterations(proof: dict):
    """Yield proofs that say something else."""
    for path in (("digest",), ("signature",), ("signer",), ("statement", "dataset"), ("statement", "index")):
        changed = json.loads(json.dumps(proof))
        home = changed if len(path) == 1 else changed[path[0]]
        home[path[-1]] = ("0" if home[path[-1]][0] != "0" else "1") + home[path[-1]][1:]
        yield changed
    for number, leaf in enumerate(proof["leaves"]):
        for at in (0, 70, 90, 120):
            changed = json.loads(json.dumps(proof))
            record = leaf["record"]
            changed["leaves"][number]["record"] = record[:at] + ("1" if record[at] == "0" else "0") + record[at + 1 :]
            yield changed
        for change in ({"number": leaf["number"] + 1}, {"path": leaf["path"][1:]}, {"path": leaf["path"][::-1]}):
            changed = json.loads(json.dumps(proof))
            changed["leaves"][number] |= change
            yield changed
    yield proof | {"statement": proof["statement"] | {"documents": 61}}
    yield proof | {"statement": proof["statement"] | {"parts": proof["statement"]["parts"][::-1]}}


@pytest.mark.parametrize("is_present", [True, False])
def test_an_altered_proof_proves_nothing(tmp_path: Path, *, is_present: bool) -> None:
    make_dataset(tmp_path, 60, SIGNER)
    digest = entry_of(3 if is_present else 99).digest
    proof = json.loads(prove_document(open_dataset(tmp_path), digest).to_bytes())

    for changed in alterations(proof):
        # another digest in question is another proof, which the records on both sides may well give
        if changed["digest"] != proof["digest"] and not is_present:
            continue
        with pytest.raises(DataError):
            check_proof(read_proof(canonical_json(changed), "proof"), "proof", fingerprint_of(SIGNER))


def test_records_that_are_left_out_make_no_absence_and_no_complete_list(tmp_path: Path) -> None:
    make_dataset(tmp_path, 60, SIGNER)
    dataset = open_dataset(tmp_path)
    there, absent = prove_document(dataset, entry_of(3).digest), prove_document(dataset, entry_of(99).digest)

    for leaves in (absent.leaves[:1], absent.leaves[1:]):
        with pytest.raises(DataError, match="the records on both sides of the digest are missing"):
            check_proof(absent.model_copy(update={"leaves": leaves}), "proof")
    with pytest.raises(DataError, match="are not consecutive"):
        check_proof(there.model_copy(update={"leaves": (there.leaves[0], there.leaves[2])}), "proof")
    assert not check_proof(there.model_copy(update={"leaves": there.leaves[1:]}), "proof").is_complete
    assert not check_proof(there.model_copy(update={"leaves": there.leaves[:2]}), "proof").is_complete


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"a": 1}', b"\xff", b"[" * 100_000, b"1" * (5 * 2**20)])
def test_what_is_no_proof_is_refused_in_a_sentence(content: bytes) -> None:
    with pytest.raises(DataError, match="proof: proves nothing"):
        read_proof(content, "proof")


def test_a_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, 5, SIGNER)

    with pytest.raises(DataError, match="expected 64 characters"):
        prove_document(open_dataset(tmp_path), "A" * 64)


@pytest.mark.parametrize("part", [1, 2])
def test_a_record_of_a_part_that_is_not_there_proves_nothing(part):
    record = {"part": part, "source": 0, "document": 0, "start": 0, "tokens": 1}
    statement = SimpleNamespace(parts=(("web", "train"),))

    with pytest.raises(DataError, match=f"a record names part {part} of 1"):
        _document_place(record, statement, "proof.json")
