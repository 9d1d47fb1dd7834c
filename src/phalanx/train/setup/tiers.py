"""The tier "auto" of a split: the best that this machine has, settled before a run begins."""

from pathlib import Path

from phalanx.errors import ConfigError, IsolationError
from phalanx.security.isolation import Program, Sandbox, start_isolated
from phalanx.security.tee import load_policy
from phalanx.train.config import RunConfig, SplitPipelineRun, SplitRun

_PROBE = "phalanx.security.isolation.probe"
_PROBE_S = 30.0
_NEEDS_NETWORK = "its sandbox has no network, but workers listen on one"


def settle_tier(run: RunConfig) -> RunConfig:
    """Return the run with the tier that "auto" stands for here; any other run as it is.

    Raises:
        ConfigError: Nothing but a simulation is possible, and the run file does not allow that; or the policy file is
            missing or wrong.
    """
    if not isinstance(run, SplitRun) or run.split.tier != "auto":
        return run
    split = run.split
    # a sandboxed enclave reaches no workers
    lacking = _NEEDS_NETWORK if isinstance(run, SplitPipelineRun) else None
    tier = _best_tier(
        split.policy, simulates=split.mode == "plaintext", may_simulate=split.allow_insecure_sim, lacking=lacking
    )
    changes = {"tier": tier, "allow_insecure_sim": split.allow_insecure_sim and tier == "sim"}
    return run.model_copy(update={"split": split.model_copy(update=changes)})


def _best_tier(policy: str | None, *, simulates: bool, may_simulate: bool, lacking: str | None = None) -> str:
    if simulates:
        # an enclave of a plaintext split is not asked for evidence
        return "sim"
    if policy is not None and load_policy(Path(policy))[1].tpm is not None:
        return "tpm"
    lacking = lacking or cannot_confine()
    if lacking is None:
        return "process"
    if not may_simulate:
        raise ConfigError(
            'split.tier = "auto": split.policy has no section [tpm], and this machine cannot confine a process '
            f"({lacking}); enrol a TPM with phalanx enclave enrol, or set allow_insecure_sim = true"
        )
    return "sim"


def cannot_confine() -> str | None:
    """Say why no program can be confined on this machine; None where one can."""
    try:
        with start_isolated(Program(_PROBE), Sandbox(), _PROBE_S) as process:
            process.wait(_PROBE_S)
    except IsolationError as exc:
        return str(exc)
    return None
