"""Frames made by hand, right or wrong, with signatures that hold."""

import struct

from phalanx.config import canonical_json
from phalanx.security.crypto import digest_hex, in_domain
from phalanx.transport.frame import genesis_digest


def header_values(sender="worker", receiver="owner", run="run-1", payload=b"", **changes):
    values = {
        "run": run,
        "kind": "activation",
        "sender": sender,
        "receiver": receiver,
        "sequence": 0,
        "previous": genesis_digest(run, sender, receiver),
        "payload_size": len(payload),
        "payload_digest": digest_hex(payload),
        "body": {"step": 1},
    }
    return {**values, **changes}


def frame_bytes(identity, header, payload=b""):
    """Sign whatever the header is: values, or bytes as they shall lie on the wire."""
    raw = header if isinstance(header, bytes) else canonical_json(header)
    signature = identity.sign_data(in_domain("frame/1", raw))
    return struct.pack(">4sBI", b"PHLX", 1, len(raw)) + raw + signature + payload


def refusal(answer):
    """The class name of the error in an answer; empty where the frame was taken."""
    assert answer[:5] == b"PHLA\x02"
    if answer[5] in (0, 2):
        return ""
    return answer[6:].split(b'"error":"')[1].split(b'"')[0].decode()
