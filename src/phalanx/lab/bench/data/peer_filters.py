"""datatrove's filters as a program: documents come in, verdicts and CPU seconds go out.

It runs in an environment of its own (``PHALANX_PEER_PYTHON``) and imports nothing of this package. One JSON line in is
``{"texts": [...], "chain": true}``, one line out ``{name: {"cpu_s": ..., "verdicts": [...]}}``; a verdict is null for a
text that stays as it is, a string for one that is dropped, and for one that stays with another text a list with its
SHA-256.
"""

import hashlib
import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

_FILTERS = {
    "gopher_repetition": "GopherRepetitionFilter",
    "gopher_quality": "GopherQualityFilter",
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
}
_OUT = sys.stdout


def main() -> None:
    """Answer each line until the input ends; output of the filters goes to standard error."""
    sys.stdout = sys.stderr
    document = importlib.import_module("datatrove.data").Document
    package = importlib.import_module("datatrove.pipeline.filters")
    filters = {name: getattr(package, kind)() for name, kind in _FILTERS.items()}
    minhash = importlib.import_module("datatrove.pipeline.dedup.minhash").MinhashDedupSignature(".")
    for peer_filter in filters.values():
        peer_filter.filter(document(text="A first text. It loads what is loaded once.", id="0"))
    _write_verdicts({"version": importlib.metadata.version("datatrove")})
    for request in sys.stdin:
        asked = json.loads(request)
        answer = {name: _run_alone(peer_filter, document, asked["texts"]) for name, peer_filter in filters.items()}
        if asked["chain"]:
            answer |= _run_chain(filters, minhash, document, asked["texts"])
        _write_verdicts(answer)


def _run_alone(one: Any, document: Any, texts: list[str]) -> dict[str, Any]:
    """One filter over all texts."""
    begun = time.process_time()
    judged = [_judge_page(one, document(text=text, id="0")) for text in texts]
    cpu_s = time.process_time() - begun
    verdicts = [_text_verdict(text, *judgement) for text, judgement in zip(texts, judged, strict=True)]
    return {"cpu_s": cpu_s, "verdicts": verdicts}


def _judge_page(one: Any, page: Any) -> tuple[Any, str]:
    try:
        return one.filter(page), page.text
    except (ArithmeticError, ValueError) as exc:  # a text without words
        return (False, type(exc).__name__), page.text


def _text_verdict(text: str, found: Any, left: str) -> str | list[str] | None:
    if found is not True:
        return str(found[1]) if isinstance(found, tuple) else "dropped"
    return None if left == text else [hashlib.sha256(left.encode("utf-8", "replace")).hexdigest()]


def _run_chain(filters: dict[str, Any], minhash: Any, document: Any, texts: list[str]) -> dict[str, Any]:
    """All filters and a signature, text after text, as its own pipelines run; nothing is left out after a drop."""
    minhash_s = 0.0
    begun = time.process_time()
    for text in texts:
        page = document(text=text, id="0")
        for peer_filter in filters.values():
            _judge_page(peer_filter, page)
        before = time.process_time()
        shingles = minhash.get_shingles(page.text)
        if len(shingles):
            minhash.get_signature(shingles)
        minhash_s += time.process_time() - before
    return {"chain": {"cpu_s": time.process_time() - begun}, "near_duplicates": {"cpu_s": minhash_s}}


def _write_verdicts(answer: dict[str, Any]) -> None:
    _OUT.write(json.dumps(answer) + "\n")
    _OUT.flush()


if __name__ == "__main__":
    main()
