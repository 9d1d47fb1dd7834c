"""Signed, chained frames between parties that do not trust each other, over gRPC with mutual TLS 1.3.

The config is there at once; what needs gRPC is imported at its first use: to read a run file must not load it.
`phalanx.transport.tensors` is apart from the rest because it needs torch.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.transport.config import JoiningWorkerConfig, TransportConfig

if TYPE_CHECKING:
    from phalanx.transport.endpoint import Endpoint
    from phalanx.transport.frame import (
        Body,
        Frame,
        HeaderFields,
        SignedHeader,
        by_kind,
        check_payload,
        encode_frame,
        parse_body,
        parse_frame,
        sign_header,
    )
    from phalanx.transport.grpc_wire import GrpcWire, JoinedPeer, describe
    from phalanx.transport.inbox import Allowance, Allowances, CheckedFrame, LinkFault
    from phalanx.transport.link import Meter, encode_refusal
    from phalanx.transport.wire import Handle, Wire
    from phalanx.transport.worker_links import (
        LocalWorkerProcesses,
        OwnerLink,
        join_owner,
        joined_workers,
    )

__all__ = [
    "Allowance",
    "Allowances",
    "Body",
    "CheckedFrame",
    "Endpoint",
    "Frame",
    "GrpcWire",
    "Handle",
    "HeaderFields",
    "JoinedPeer",
    "JoiningWorkerConfig",
    "LinkFault",
    "LocalWorkerProcesses",
    "Meter",
    "OwnerLink",
    "SignedHeader",
    "TransportConfig",
    "Wire",
    "by_kind",
    "check_payload",
    "describe",
    "encode_frame",
    "encode_refusal",
    "join_owner",
    "joined_workers",
    "parse_body",
    "parse_frame",
    "sign_header",
]

if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
