"""What changed between two datasets: sources, steps, settings, counts, and documents by their digests."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.build.look import signed_report
from phalanx.data.shards import Dataset

_ABSENT = "-"


def compare(first: Dataset, second: Dataset) -> dict[str, Any]:
    """Return what is other in the second dataset.

    Raises:
        DataError: A report or an index is not the one that was signed.
    """
    reports = signed_report(first), signed_report(second)
    before, after = (_flat(_comparable(report)) for report in reports)
    changed = [
        {"what": name, "before": before.get(name, _ABSENT), "after": after.get(name, _ABSENT)}
        for name in sorted(before.keys() | after.keys())
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]
    digests = _digests(first), _digests(second)
    return {
        "same": first.digest == second.digest,
        "changed": changed,
        "documents": {
            "before": first.manifest.documents,
            "after": second.manifest.documents,
            "removed": int(np.setdiff1d(digests[0], digests[1], assume_unique=True).size),
            "added": int(np.setdiff1d(digests[1], digests[0], assume_unique=True).size),
        },
    }


def named_changes(first: Dataset, second: Dataset, most: int) -> Iterator[dict[str, str]]:
    """Yield documents that only one of two datasets has, `most` of each at most."""
    for change, dataset, other in (("removed", first, second), ("added", second, first)):
        known = set(_digests(other).tolist())
        left = most
        for group, splits in dataset.groups.items():
            for split in splits:
                for entry in dataset.documents(group, split):
                    if left and bytes.fromhex(entry.digest) not in known:
                        left -= 1
                        yield {"change": change, "document": entry.name, "digest": entry.digest}


def _digests(dataset: Dataset) -> NDArray[np.void]:
    """Return the digests of all documents, each once, 32 bytes a document."""
    table = dataset.index_table().read_all()
    return np.unique(np.ascontiguousarray(table["digest"]).view("V32").reshape(-1))


def _comparable(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with names in place of positions, so that a source that came first moves no other one."""
    steps = {step["name"]: {"place": place, **step} for place, step in enumerate(report["steps"])}
    sources = {
        source["name"]: {name: value for name, value in source.items() if name not in ("samples", "name")}
        for source in report["sources"]
    }
    groups = {f"{group['group']}.{group['split']}": group for group in report["groups"]}
    rest = {name: report[name] for name in ("tokenizer", "versions")}
    return {"steps": steps, "sources": sources, "groups": groups, **rest}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        inner = (_flat(one, f"{name}.{key}".removeprefix(".")) for key, one in value.items())
        return {key: one for found in inner for key, one in found.items()}
    return {name: value}
