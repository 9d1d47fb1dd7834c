"""Conversations: their form, their text by a chat template in a sandbox, and what is learned of them.

What the process of a template needs is there at once; what needs torch or a tokenizer is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.chat.conversation import ChatMessage, Conversation, Role, ToolCall, conversation_of
    from phalanx.data.chat.encoding import ChatEncoder, EncodedConversation
    from phalanx.data.chat.renderer import ChatRenderer, RenderedChat, TurnSpan
    from phalanx.data.chat.template import (
        DEFAULT_TEMPLATES,
        TEMPLATE_FILE,
        ChatTemplate,
        default_template,
        model_template,
    )

__all__ = [
    "DEFAULT_TEMPLATES",
    "TEMPLATE_FILE",
    "ChatEncoder",
    "ChatMessage",
    "ChatRenderer",
    "ChatTemplate",
    "Conversation",
    "EncodedConversation",
    "RenderedChat",
    "Role",
    "ToolCall",
    "TurnSpan",
    "conversation_of",
    "default_template",
    "model_template",
]

if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
