"""Trees are those of Certificate Transparency: its published roots come out, and a path proves its leaf alone."""

import pytest

from phalanx.data.shards.merkle import audit_path, leaf_hash, root_from_path, tree_root

LEAVES = [
    bytes.fromhex(one)
    for one in (
        *("", "00", "10", "2021", "3031", "40414243"),
        *("5051525354555657", "606162636465666768696a6b6c6d6e6f"),
    )
]
# the reference roots of the certificate-transparency project
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


@pytest.mark.parametrize("size", range(9))
def test_the_published_roots_come_out(size: int) -> None:
    assert tree_root([leaf_hash(leaf) for leaf in LEAVES[:size]]).hex() == ROOTS[size]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 33])
def test_a_path_proves_its_leaf_at_its_place_and_no_other(size: int) -> None:
    hashes = [leaf_hash(bytes([number])) for number in range(size)]
    root = tree_root(hashes)

    for index in range(size):
        path = audit_path(hashes, index)
        assert root_from_path(hashes[index], index, size, path) == root
        for other in range(size):
            if other != index:
                try:
                    found = root_from_path(hashes[index], other, size, path)
                except ValueError:
                    continue
                assert found != root


def test_roots_of_whole_subtrees_lead_to_the_same_root() -> None:
    hashes = [leaf_hash(bytes([number])) for number in range(23)]

    blocks = [tree_root(hashes[at : at + 4]) for at in range(0, 23, 4)]

    assert tree_root(blocks) == tree_root(hashes)


def test_paths_of_a_wrong_length_and_leaves_outside_are_refused() -> None:
    hashes = [leaf_hash(bytes([number])) for number in range(5)]
    path = audit_path(hashes, 1)

    with pytest.raises(ValueError, match="too short"):
        root_from_path(hashes[1], 1, 5, path[:-1])
    with pytest.raises(ValueError, match="too long"):
        root_from_path(hashes[1], 1, 5, [*path, path[0]])
    with pytest.raises(ValueError, match="outside of a tree of 5"):
        root_from_path(hashes[1], 5, 5, path)
    with pytest.raises(IndexError, match="leaf 5 of 5"):
        audit_path(hashes, 5)
