"""One door before any engine: the keys, budgets, filters and log of this server in front of others."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.gateway.app import make_gateway as make_gateway, run_gateway as run_gateway
    from phalanx.serve.gateway.config import (
        BackendConfig as BackendConfig,
        GatewayConfig as GatewayConfig,
        GatewayLimits as GatewayLimits,
        load_gateway_config as load_gateway_config,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
