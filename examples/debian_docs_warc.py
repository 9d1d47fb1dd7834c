"""Make a web archive of Debian's documentation packages, as a crawler would have fetched their pages.

    python examples/debian_docs_warc.py debian_docs.warc.gz [--folder /usr/share/doc] [--most 500]

The same pages give the same archive.
"""

import argparse
import base64
import gzip
import hashlib
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("python3.*-doc", "debian-handbook", "postgresql-doc-*", "linux-doc-*", "libreoffice-help-*", "anarchism")


def pages(folder: Path, most: int | None) -> Iterator[Path]:
    """Yield the pages of each installed package in the order of their names, at most so many of each."""
    for pattern in PACKAGES:
        for package in sorted(folder.glob(pattern)):
            found = sorted(path for path in package.rglob("*.html") if path.is_file() and not path.is_symlink())
            yield from found if most is None else found[:: max(1, -(-len(found) // most))]


def record(url: str, body: bytes, fetched: datetime) -> bytes:
    """Return one response as WARC 1.1 has it, with the digests of block and payload."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    fields = {
        "WARC-Type": "response",
        "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, url)}>",
        "WARC-Target-URI": url,
        "WARC-Date": fetched.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "WARC-Block-Digest": digest(head + body),
        "WARC-Payload-Digest": digest(body),
        "Content-Type": "application/http; msgtype=response",
        "Content-Length": str(len(head) + len(body)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"WARC/1.1\r\n{lines}\r\n".encode() + head + body + b"\r\n\r\n"


def digest(content: bytes) -> str:
    """Return a digest as archives write it."""
    return "sha1:" + base64.b32encode(hashlib.sha1(content, usedforsecurity=False).digest()).decode()


def main(words: list[str]) -> int:
    """Write the archive; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/usr/share/doc"))
    parser.add_argument("--most", type=int, help="pages of each package")
    asked = parser.parse_args(words)
    count = size = 0
    with asked.out.open("wb") as archive:
        for path in pages(asked.folder, asked.most):
            body = path.read_bytes()
            url = f"https://docs.example.org/{path.relative_to(asked.folder).as_posix()}"
            fetched = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            # a member of its own for each record, so that a reader can begin at any of them
            archive.write(gzip.compress(record(url, body, fetched), mtime=0))
            count, size = count + 1, size + len(body)
    if not count:
        sys.stderr.write(f"{asked.folder}: no documentation package is installed: apt-get install python3.11-doc\n")
        return 1
    sys.stdout.write(f"{asked.out}: {count} pages, {size / 1e6:.1f} MB of HTML\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
