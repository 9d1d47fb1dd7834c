"""The process that takes text out of pages: ``python -m phalanx.data.sources.page_process``.

Libraries for web pages take time and memory that grow with the square of a page that was made for it: by attributes of
one element, options of one list, lists within lists, elements that are never closed. An order has the seconds of a
processor that its page may take. Beyond them, or beyond its memory, this process ends.
"""

import signal
from collections.abc import Iterator
from typing import Any

from phalanx.child import Message, answer_orders, bound_memory, die_with_parent
from phalanx.data.sources.extractors import EXTRACTORS, Extract, extract_with
from phalanx.errors import DataError

MEMORY_BYTES = 3 << 30
"""Beside what the process starts with: a page of 32 MiB that people read takes a third of it."""


def main() -> None:
    """Answer orders until there are no more."""
    die_with_parent()
    # its default is to end the process, which a handler in Python could not do while a library works
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    extract: Extract | None = None

    def extract_text(order: dict[str, Any], page: bytes) -> Iterator[Message]:
        nonlocal extract
        if extract is None:
            extract = EXTRACTORS[order["extractor"]](main_content=order["main_content"])
            bound_memory(MEMORY_BYTES)
        signal.setitimer(signal.ITIMER_PROF, order["seconds"])
        try:
            text = extract_with(extract, page.decode("utf-8", "surrogatepass")).encode("utf-8", "surrogatepass")
            answer: Message = {"end": True}, text
        except DataError as exc:
            answer = {"error": str(exc)}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield answer

    answer_orders(extract_text)


if __name__ == "__main__":
    main()
