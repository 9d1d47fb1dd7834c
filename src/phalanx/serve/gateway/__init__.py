"""One door before any engine: the keys, budgets, filters and log of this server in front of others."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.gateway.app import make_gateway, run_gateway
    from phalanx.serve.gateway.config import BackendConfig, GatewayConfig, GatewayLimits, load_gateway_config

__all__ = ["BackendConfig", "GatewayConfig", "GatewayLimits", "load_gateway_config", "make_gateway", "run_gateway"]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
