"""Signed, chained frames between parties that do not trust each other, over gRPC with mutual TLS 1.3.

The config is there at once; what needs gRPC is imported at its first use: to read a run file must not load it.
`phalanx.transport.tensors` is apart from the rest because it needs torch.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.transport.config import JoiningWorkerConfig as JoiningWorkerConfig, TransportConfig as TransportConfig

if TYPE_CHECKING:
    from phalanx.transport.endpoint import Endpoint as Endpoint
    from phalanx.transport.frame import (
        Body as Body,
        Frame as Frame,
        HeaderFields as HeaderFields,
        SignedHeader as SignedHeader,
        bodies_by_kind as bodies_by_kind,
        check_payload as check_payload,
        encode_frame as encode_frame,
        parse_body as parse_body,
        parse_frame as parse_frame,
        sign_header as sign_header,
    )
    from phalanx.transport.grpc_wire import (
        GrpcWire as GrpcWire,
        JoinedPeer as JoinedPeer,
        ask_peer_run as ask_peer_run,
        ask_peer_stacks as ask_peer_stacks,
    )
    from phalanx.transport.inbox import (
        Allowance as Allowance,
        Allowances as Allowances,
        CheckedFrame as CheckedFrame,
        LinkFault as LinkFault,
    )
    from phalanx.transport.link import CpuMeter as CpuMeter, encode_refusal as encode_refusal
    from phalanx.transport.wire import Handle as Handle, Wire as Wire
    from phalanx.transport.worker_links import (
        LocalWorkerProcesses as LocalWorkerProcesses,
        OwnerLink as OwnerLink,
        join_owner as join_owner,
        joined_workers as joined_workers,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
