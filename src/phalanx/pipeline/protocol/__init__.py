"""The protocol between parties: messages and their bounds, signed headers, tensor streams, the mailbox."""
