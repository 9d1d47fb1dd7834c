"""The protocols of the server: strict bodies, one internal request, one reply, and its forms."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.api.app import GENERATION_ROUTES as GENERATION_ROUTES, make_app as make_app
    from phalanx.serve.api.service import ModelReply as ModelReply, Service as Service


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
