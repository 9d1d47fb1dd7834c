"""Invitations: one line of text by which another machine makes its keys and has them certified."""

from phalanx.security.invite.client import JoinAnswer, JoinOffer, enrol
from phalanx.security.invite.knock import OpenDoor
from phalanx.security.invite.register import Invitations
from phalanx.security.invite.server import EnrolmentServer, JoinTerms
from phalanx.security.invite.token import JoinToken

__all__ = [
    "EnrolmentServer",
    "Invitations",
    "JoinAnswer",
    "JoinOffer",
    "JoinTerms",
    "JoinToken",
    "OpenDoor",
    "enrol",
]
