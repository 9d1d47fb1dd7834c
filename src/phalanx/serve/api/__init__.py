"""The protocols of the server: strict bodies, one internal request, one reply, and its forms."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.api.app import GENERATION_ROUTES, make_app
    from phalanx.serve.api.service import Reply, Service

__all__ = ["GENERATION_ROUTES", "Reply", "Service", "make_app"]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
