"""The process that takes text out of pages: ``python -m phalanx.data.sources.page_process``.

Libraries for web pages take time and memory that grow with the square of a page that was made for it: by attributes of
one element, options of one list, lists within lists, elements that are never closed. An order has the seconds of a
processor that its page may take. Beyond them, or beyond its memory, this process ends.
"""

import json
import os
import signal
import sys

from phalanx.child import bound_memory, die_with_parent
from phalanx.data.sources.extractors import EXTRACTORS, Extract, text_by
from phalanx.errors import DataError

MEMORY_BYTES = 3 << 30
"""Beside what the process starts with: a page of 32 MiB that people read takes a third of it."""


def main() -> None:
    """Answer orders until there are no more."""
    die_with_parent()
    # what a library prints is no answer
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # its default is to end the process, which a handler in Python could not do while a library works
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    extract: Extract | None = None
    while request := sys.stdin.buffer.readline():
        order = json.loads(request)
        page = sys.stdin.buffer.read(order["bytes"]).decode("utf-8", "surrogatepass")
        if extract is None:
            extract = EXTRACTORS[order["extractor"]](main_content=order["main_content"])
            bound_memory(MEMORY_BYTES)
        signal.setitimer(signal.ITIMER_PROF, order["seconds"])
        try:
            answer, text = {}, text_by(extract, page).encode("utf-8", "surrogatepass")
        except DataError as exc:
            answer, text = {"error": str(exc)}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps({**answer, "end": True, "bytes": len(text)}).encode() + b"\n" + text)
        out.flush()


if __name__ == "__main__":
    main()
