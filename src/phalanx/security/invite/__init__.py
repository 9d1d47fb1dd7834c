"""Invitations: one line of text by which another machine makes its keys and has them certified."""

from phalanx.security.invite.client import Enrolled, enrol
from phalanx.security.invite.register import Invitations
from phalanx.security.invite.server import EnrolmentServer, Terms
from phalanx.security.invite.token import Token

__all__ = ["Enrolled", "EnrolmentServer", "Invitations", "Terms", "Token", "enrol"]
