"""Invitations: one line of text by which another machine makes its keys and has them certified."""

from phalanx.security.invite.client import JoinAnswer as JoinAnswer, JoinOffer as JoinOffer, enrol as enrol
from phalanx.security.invite.knock import OpenDoor as OpenDoor
from phalanx.security.invite.register import Invitations as Invitations
from phalanx.security.invite.server import EnrolmentServer as EnrolmentServer, JoinTerms as JoinTerms
from phalanx.security.invite.token import JoinToken as JoinToken
