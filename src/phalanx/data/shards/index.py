"""The index of a dataset: every document in the order of digests, in a tree that proves presence and absence."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.data.shards.leaves import LeafStore, LeafWriter, VerifiedFile
from phalanx.data.shards.manifest import BLOCK_RECORDS, INDEX_BYTES, IndexRecord, PartRecord
from phalanx.data.shards.merkle import leaf_hash, tree_root
from phalanx.data.shards.records import DOCUMENT, INDEX, START

TABLE_FILE, NODES_FILE = "shards/index/table", "shards/index/nodes"


def write_index(parts: Sequence[PartRecord], store: LeafStore, leaf_writer: Callable[[str], LeafWriter]) -> IndexRecord:
    """Write the index over the documents of all parts; takes about 150 bytes of memory a document."""
    content, nodes = make_index(parts, store)
    table_file, nodes_file = leaf_writer(TABLE_FILE), leaf_writer(NODES_FILE)
    table_file.append_content(content)
    nodes_file.append_content(b"".join(nodes))
    return IndexRecord(root=tree_root(nodes).hex(), table=table_file.finish_file(), nodes=nodes_file.finish_file())


def make_index(parts: Sequence[PartRecord], store: LeafStore) -> tuple[bytes, list[bytes]]:
    """Return the records of all documents in the order of digests, and the nodes that are kept of their tree."""
    table = np.concatenate([_part_records(number, part, store) for number, part in enumerate(parts)])
    digest_words = np.ascontiguousarray(table["digest"]).view(">u8")
    order = np.lexsort((table["document"], table["part"], *(digest_words[:, word] for word in (3, 2, 1, 0))))
    content = table[order].tobytes()
    block = BLOCK_RECORDS * INDEX_BYTES
    with memoryview(content) as view:
        nodes = [tree_root(record_hashes(view[start : start + block])) for start in range(0, len(content), block)]
    return content, nodes


def record_hashes(records: bytes | memoryview) -> list[bytes]:
    """Return the leaf hash of every index record."""
    return [leaf_hash(records[start : start + INDEX_BYTES]) for start in range(0, len(records), INDEX_BYTES)]


def _part_records(number: int, part: PartRecord, store: LeafStore) -> NDArray[np.void]:
    records = VerifiedFile(store, f"{part.shard_directory}/records", part.records, DOCUMENT).read_all()
    starts = VerifiedFile(store, f"{part.shard_directory}/starts", part.starts, START).read_all()
    table = np.empty(part.documents, INDEX)
    table["digest"], table["source"] = records["digest"], records["source"]
    table["part"], table["document"] = number, np.arange(part.documents)
    table["start"], table["tokens"] = starts[:-1], np.diff(starts)
    return table
