"""Which requests a round works on, and how many tokens it drafts."""
