"""Witnesses of the audit log: a Merkle head over its lines, cosigned by others, that any web server can publish."""

from phalanx.security.witness.client import publish_head as publish_head
from phalanx.security.witness.notes import (
    CheckpointSigner as CheckpointSigner,
    NoteKey as NoteKey,
    SignedCheckpoint as SignedCheckpoint,
)
from phalanx.security.witness.proofs import (
    ForkProof as ForkProof,
    LineProof as LineProof,
    compare_histories as compare_histories,
)
from phalanx.security.witness.published import (
    HistoryCopy as HistoryCopy,
    mirror_history as mirror_history,
    read_checkpoint as read_checkpoint,
    read_history as read_history,
    replace_synced as replace_synced,
    write_tiles as write_tiles,
)
from phalanx.security.witness.quorum import WitnessPolicy as WitnessPolicy
from phalanx.security.witness.service import (
    Witness as Witness,
    add_log as add_log,
    load_witness as load_witness,
    log_signer as log_signer,
    make_witness as make_witness,
    witness_app as witness_app,
)
from phalanx.security.witness.timestamps import (
    STAMP_SUFFIX as STAMP_SUFFIX,
    Timestamp as Timestamp,
    TimestampAuthority as TimestampAuthority,
)
