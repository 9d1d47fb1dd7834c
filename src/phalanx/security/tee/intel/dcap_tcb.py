"""The TCB level of a platform, by Intel's signed tables.

Source: Intel PCS API v4, "Get TCB Info" and "Get Enclave Identity", with their rules of comparison.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.intel.dcap_quote import SgxBody, TdxBody
from phalanx.security.tee.intel.pck import PckFacts
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

Status = Literal[
    "UpToDate",
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
    "Revoked",
]
_Hex = Annotated[str, StringConstraints(pattern=r"^(?:[0-9A-Fa-f]{2})*$", max_length=128)]
_Svn = Annotated[int, Field(ge=0, le=255)]
_Svn16 = Annotated[int, Field(ge=0, le=65535)]


class _Table(BaseModel):
    """Intel adds keys now and then, so unknown ones pass: the table is signed as a whole."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Component(_Table):
    svn: _Svn


class _PlatformTcb(_Table):
    sgxtcbcomponents: tuple[_Component, ...] = Field(min_length=16, max_length=16)
    pcesvn: _Svn16
    tdxtcbcomponents: tuple[_Component, ...] | None = Field(default=None, min_length=16, max_length=16)


class _SvnTcb(_Table):
    isvsvn: _Svn16


class _PlatformLevel(_Table):
    tcb: _PlatformTcb
    status: Status = Field(alias="tcbStatus")
    advisories: tuple[str, ...] = Field(default=(), alias="advisoryIDs")


class _SvnLevel(_Table):
    tcb: _SvnTcb
    status: Status = Field(alias="tcbStatus")
    advisories: tuple[str, ...] = Field(default=(), alias="advisoryIDs")


class _Module(_Table):
    mrsigner: _Hex
    attributes: _Hex
    attributes_mask: _Hex = Field(alias="attributesMask")


class _ModuleIdentity(_Module):
    id: str
    levels: tuple[_SvnLevel, ...] = Field(alias="tcbLevels")


class TcbInfo(_Table):
    """Intel's table of TCB levels for one family of platforms."""

    id: Literal["SGX", "TDX"]
    version: Literal[3]
    issued: str = Field(alias="issueDate")
    next_update: str = Field(alias="nextUpdate")
    fmspc: _Hex
    pce_id: _Hex = Field(alias="pceId")
    evaluation: int = Field(alias="tcbEvaluationDataNumber", ge=0)
    tdx_module: _Module | None = Field(default=None, alias="tdxModule")
    tdx_module_identities: tuple[_ModuleIdentity, ...] = Field(default=(), alias="tdxModuleIdentities")
    levels: tuple[_PlatformLevel, ...] = Field(alias="tcbLevels")


class QeIdentity(_Table):
    """Intel's description of its quoting enclave."""

    id: Literal["QE", "TD_QE"]
    version: Literal[2]
    issued: str = Field(alias="issueDate")
    next_update: str = Field(alias="nextUpdate")
    evaluation: int = Field(alias="tcbEvaluationDataNumber", ge=0)
    misc_select: _Hex = Field(alias="miscselect")
    misc_select_mask: _Hex = Field(alias="miscselectMask")
    attributes: _Hex
    attributes_mask: _Hex = Field(alias="attributesMask")
    mrsigner: _Hex
    product_id: _Svn16 = Field(alias="isvprodid")
    levels: tuple[_SvnLevel, ...] = Field(alias="tcbLevels")


@dataclass(frozen=True)
class Level:
    """A status and what Intel says about it."""

    status: Status
    advisories: tuple[str, ...] = ()


def platform_level(table: TcbInfo, pck: PckFacts, body: SgxBody | TdxBody) -> Level:
    """Return the first level, from the newest down, that no version of the platform is below.

    Raises:
        RefusedEvidenceError: The table is of another platform, or every level is above.
    """
    if table.fmspc.lower() != pck.fmspc.hex() or table.pce_id.lower() != pck.pce_id.hex():
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER,
            f"TCB info: of platform {table.fmspc}, the PCK certificate is of {pck.fmspc.hex()}",
        )
    for level in table.levels:
        tcb = level.tcb
        if not _reaches_level(pck.svns, tcb.sgxtcbcomponents) or pck.pce_svn < tcb.pcesvn:
            continue
        if isinstance(body, TdxBody):
            if tcb.tdxtcbcomponents is None:
                continue
            # the first two are the module's own, and judged by its identity where it has one
            start = 2 if body.tcb_svn[1] else 0
            if not _reaches_level(body.tcb_svn[start:], tcb.tdxtcbcomponents[start:]):
                continue
        return Level(level.status, level.advisories)
    raise RefusedEvidenceError(
        RefusedEvidenceReason.TCB_TOO_OLD, "TCB info: the platform is below every level that Intel knows"
    )


def module_level(table: TcbInfo, body: TdxBody) -> Level:
    """Check the TDX module against its identity and return its level.

    Raises:
        RefusedEvidenceError: Another signer or attributes, an unknown module, or below every level.
    """
    svn, version = body.tcb_svn[0], body.tcb_svn[1]
    levels: tuple[_SvnLevel, ...] | None = None
    module: _Module | None = table.tdx_module
    if version:
        name = f"TDX_{version:02X}"
        identity = next((entry for entry in table.tdx_module_identities if entry.id.upper() == name), None)
        if identity is None:
            raise RefusedEvidenceError(RefusedEvidenceReason.WRONG_SIGNER, f"TDX module {name}: not in Intel's table")
        module, levels = identity, identity.levels
    if module is None:
        raise RefusedEvidenceError(RefusedEvidenceReason.MALFORMED, "TCB info: says nothing of the TDX module")
    if module.mrsigner.lower() != body.signer_seam.hex():
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, "TDX module: signed by somebody else than Intel's table says"
        )
    if not _masked_equal(body.seam_attributes, module.attributes, module.attributes_mask):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.FORBIDDEN_MODE, "TDX module: its attributes are not those of Intel's table"
        )
    return Level("UpToDate") if levels is None else _svn_level(levels, svn, "TDX module")


def quoting_enclave_level(table: QeIdentity, report: SgxBody) -> Level:
    """Check the quoting enclave against Intel's description and return its level."""
    same = (
        table.mrsigner.lower() == report.fields["mrsigner"]
        and table.product_id == report.product_id
        and _masked_equal(report.misc_select, table.misc_select, table.misc_select_mask)
        and _masked_equal(report.attributes, table.attributes, table.attributes_mask)
    )
    if not same:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.WRONG_SIGNER, "quoting enclave: not the one that Intel describes"
        )
    return _svn_level(table.levels, report.svn, "quoting enclave")


def worst_level(levels: Sequence[Level]) -> Level:
    """Join the levels of platform, module and quoting enclave into one; the platform's comes first.

    An outdated enclave or module makes the whole outdated; a need of the platform's configuration stays in the status.
    """
    platform = levels[0].status
    others = [level.status for level in levels[1:]]
    status: Status = platform
    if "Revoked" in (platform, *others):
        status = "Revoked"
    elif any(other.startswith("OutOfDate") for other in others):
        status = "OutOfDateConfigurationNeeded" if "Configuration" in platform else "OutOfDate"
    elif platform == "UpToDate":
        status = next((other for other in others if other != "UpToDate"), platform)
    return Level(status, tuple(dict.fromkeys(name for level in levels for name in level.advisories)))


def _svn_level(levels: Iterable[_SvnLevel], svn: int, where: str) -> Level:
    for level in levels:
        if svn >= level.tcb.isvsvn:
            return Level(level.status, level.advisories)
    raise RefusedEvidenceError(
        RefusedEvidenceReason.TCB_TOO_OLD, f"{where}: version {svn} is below every level that Intel knows"
    )


def _reaches_level(svns: bytes, components: Sequence[_Component]) -> bool:
    return all(svn >= component.svn for svn, component in zip(svns, components, strict=True))


def _masked_equal(found: bytes, expected: str, mask: str) -> bool:
    expected_bytes, bits = bytes.fromhex(expected), bytes.fromhex(mask)
    if not len(found) == len(expected_bytes) == len(bits):
        return False
    return all(byte & bit == other & bit for byte, other, bit in zip(found, expected_bytes, bits, strict=True))


def tcb_claims(level: Level, evaluation: int) -> Mapping[str, int | str]:
    """Return the claims of a result about a TCB."""
    return {"status": level.status, "advisories": " ".join(level.advisories), "evaluation": evaluation}
