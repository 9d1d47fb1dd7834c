"""Strict, frozen configuration: TOML on disk, one error per mistake, one digest per config."""

from phalanx.config.code_source import KEPT_CODE as KEPT_CODE, is_own as is_own
from phalanx.config.text import (
    canonical_json as canonical_json,
    digest_config as digest_config,
    parse_strict_json as parse_strict_json,
)
from phalanx.config.load import (
    Variants as Variants,
    config_of as config_of,
    dump_toml as dump_toml,
    load_config as load_config,
    parse_override as parse_override,
)
from phalanx.config.own_code import (
    OWN_KIND as OWN_KIND,
    changed_code as changed_code,
    check_methods as check_methods,
    code_key as code_key,
    unfit_code_error as unfit_code_error,
    open_own_code as open_own_code,
    own_references as own_references,
    pin_own_code as pin_own_code,
    pin_reference as pin_reference,
    resolve_kind as resolve_kind,
    source_files as source_files,
    users_traceback as users_traceback,
)
from phalanx.config.load import check_relative_paths as check_relative_paths
from phalanx.config.strict import (
    RENAMED_KEYS as RENAMED_KEYS,
    RefusedKeyError as RefusedKeyError,
    StrictModel as StrictModel,
    any_kind as any_kind,
    check_name as check_name,
    one_of as one_of,
)
from phalanx.config.text import (
    escape_controls as escape_controls,
    is_plain as is_plain,
    join_names as join_names,
    printable_text as printable_text,
    unique_keys as unique_keys,
)
