"""Invitations: one line of text by which another machine makes its keys and has them certified."""

from phalanx.security.invite.client import (
    JoinAnswer as JoinAnswer,
    JoinOffer as JoinOffer,
    enrol_machine as enrol_machine,
)
from phalanx.security.invite.reachability import ReachabilityListener as ReachabilityListener
from phalanx.security.invite.register import Invitations as Invitations
from phalanx.security.invite.server import EnrolmentServer as EnrolmentServer, JoinTerms as JoinTerms
from phalanx.security.invite.token import JoinToken as JoinToken
