"""Conversations: their form, their text by a chat template in a sandbox, and their learned part.

What the process of a template needs is there at once; what needs torch or a tokenizer is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.chat.conversation import ChatMessage as ChatMessage, parse_conversation as parse_conversation
    from phalanx.data.chat.encoding import ChatEncoder as ChatEncoder
    from phalanx.data.chat.template import (
        TEMPLATE_FILE as TEMPLATE_FILE,
        ChatTemplate as ChatTemplate,
        model_template as model_template,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
