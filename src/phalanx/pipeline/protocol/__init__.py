"""What parties say to each other: messages and their bounds, signed headers, tensor streams, the mailbox."""
