"""What drafts learn from: conversations, the target's answers, and rows of tokens."""
