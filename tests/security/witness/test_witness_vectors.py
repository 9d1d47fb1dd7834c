"""Vectors of others: RFC 6962 trees of Certificate Transparency, Go's notes, and a checkpoint of a public log."""

import pytest

from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.witness.notes import NoteKey, SignedCheckpoint
from phalanx.security.witness.tree import EMPTY_ROOT, HashTree, check_consistency, check_inclusion, hash_leaf

GO_LOG = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"
GO_CHECKPOINT = (
    "go.sum database tree\n15067302\ngJyioq6dwR9n+NjEWORfYmH+ubeYm3kH42BBQ0bTpYI=\n\n"
    "— sum.golang.org Az3grp1rvWOs5NKlr/xR4GLN/CDyzzakmt1o61uSxYKpK1SerqOP2ClbX/peKUZjYnyomH5Xz7GZG3TpB7OeKn4E2ww=\n"
    "— test.example.com qTGhC/xIPQ0AXKHK6Y+9ypRfuvMZWPjRXM8NiOg5M1WREn07VQXyuIXM3NRNav3ieVFLUqDRK77PWDmL6w8w84UqeAw=\n"
).encode()
CT_LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
CT_ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_roots_of_certificate_transparency():
    tree = HashTree(hash_leaf(bytes.fromhex(leaf)) for leaf in CT_LEAVES)

    assert [tree.head_at(n + 1).root.hex() for n in range(8)] == CT_ROOTS
    assert tree.head_at(0).root == EMPTY_ROOT


def test_a_checkpoint_of_a_public_log_verifies_and_foreign_signatures_are_ignored():
    signed, key = SignedCheckpoint.from_bytes(GO_CHECKPOINT), NoteKey.from_text(GO_LOG)

    assert signed.check_signatures([key]) == {key: 0}
    assert signed.to_bytes() == GO_CHECKPOINT
    assert key.to_text() == GO_LOG
    assert signed.checkpoint.head.size == 15067302


@pytest.mark.parametrize("place", [3, 22, 40])
def test_a_changed_checkpoint_of_a_public_log_is_refused(place):
    text = bytearray(GO_CHECKPOINT)
    text[place] ^= 1

    with pytest.raises((SignatureError, AuditLogError)):
        SignedCheckpoint.from_bytes(bytes(text)).check_signatures([NoteKey.from_text(GO_LOG)])


def test_every_proof_of_every_size_holds_and_no_other_one():
    leaves = [hash_leaf(bytes([n])) for n in range(21)]
    tree = HashTree(leaves)
    for size in range(1, 22):
        head = tree.head_at(size)
        for index in range(size):
            path = tree.prove_inclusion(index, size)
            check_inclusion(leaves[index], index, head, path)
            for lie in ((leaves[index - 1], path), (leaves[index], [*path, path[-1] if path else leaves[0]])):
                if size > 1:
                    with pytest.raises(AuditLogError):
                        check_inclusion(lie[0], index, head, lie[1])
        for old in range(size + 1):
            path = tree.prove_consistency(old, size)
            check_consistency(tree.head_at(old), head, path)
            if 0 < old < size:
                fork = HashTree([*leaves[: old - 1], leaves[old], *leaves[old:]]).head_at(old)
                for wrong_old, wrong_path in (
                    (fork, path),
                    (tree.head_at(old), path[:-1]),
                    (tree.head_at(old), [*path, path[0]]),
                ):
                    with pytest.raises(AuditLogError):
                        check_consistency(wrong_old, head, wrong_path)
