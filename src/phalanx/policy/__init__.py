"""An organisation's rules for training and release: a signed file whose clauses stop a run, an export or a server."""

from phalanx.policy.approvals import (
    Approval as Approval,
    ActApproval as ActApproval,
    approve_release as approve_release,
    count_approvals as count_approvals,
    person_of_key as person_of_key,
)
from phalanx.policy.clauses import (
    Breach as Breach,
    EndFacts as EndFacts,
    RunFacts as RunFacts,
    SourceShare as SourceShare,
    check_exposure as check_exposure,
    check_release as check_release,
    check_start as check_start,
    raise_breaches as raise_breaches,
)
from phalanx.policy.policy_file import (
    POLICY_FILE as POLICY_FILE,
    TrainingPolicy as TrainingPolicy,
    PolicyReference as PolicyReference,
    SignedPolicy as SignedPolicy,
    SuiteIdentity as SuiteIdentity,
    read_policy as read_policy,
    sign_policy as sign_policy,
    signature_file as signature_file,
)
from phalanx.policy.gate import (
    HeadMemory as HeadMemory,
    RoleGate as RoleGate,
    default_reference as default_reference,
    find_projects as find_projects,
)
from phalanx.policy.rights import (
    CALLS as CALLS,
    COMMANDS as COMMANDS,
    FOUR_EYES as FOUR_EYES,
    ROLES as ROLES,
    Action as Action,
    Right as Right,
)
from phalanx.policy.roles import (
    Project as Project,
    ProjectRoles as ProjectRoles,
    sign_roles as sign_roles,
    verify_access_log as verify_access_log,
)
from phalanx.policy.signers import open_person_signer as open_person_signer
