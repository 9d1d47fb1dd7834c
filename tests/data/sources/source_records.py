"""What the tests of readers share: all records of a source, and damage of the same kind every time."""

import random

from phalanx.data.sources import BrokenRecord, Document, open_source
from phalanx.errors import DataError


def records(config):
    """Every record of every file of a source, as a build reads them."""
    source = open_source(config)
    return [record for file in source.files for record in source.read_file_records(file)]


def raw_bytes(record):
    return record.origin.raw_bytes if isinstance(record, Document) else record.raw_bytes


def raw_total(found):
    return sum(raw_bytes(record) for record in found)


def texts(found):
    return [record.text for record in found if isinstance(record, Document)]


def reasons(found):
    return [record.reason for record in found if isinstance(record, BrokenRecord)]


def mutants(seed_inputs, count, seed):
    """Yield inputs with bytes changed, cut out, doubled or put in; the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        content = bytearray(draw.choice(seed_inputs))
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(content) + 1)
            size = draw.choice((1, 1, 2, 8, 64))
            act = draw.randrange(5)
            if act == 0 and at < len(content):
                content[at] ^= 1 << draw.randrange(8)
            elif act == 1:
                del content[at : at + size]
            elif act == 2:
                content[at:at] = content[at : at + size]
            elif act == 3:
                content[at:at] = draw.choice((b"\0", b"\xff" * size, b'"', b"\n", b"<", b"[" * size, b"99999999"))
            else:
                del content[at:]
        yield bytes(content)


def read_mutants(config, path, contents):
    """Read each input; every record is a document or a broken one, or the file is refused by an error of ours."""
    documents = 0
    for content in contents:
        path.write_bytes(content)
        try:
            found = records(config)
        except DataError:
            continue
        assert all(isinstance(record, Document | BrokenRecord) for record in found)
        assert all(raw_bytes(record) >= 0 for record in found)
        assert all(record.text.encode() is not None for record in found if isinstance(record, Document))
        documents += len(texts(found))
    return documents
