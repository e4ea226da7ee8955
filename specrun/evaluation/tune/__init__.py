"""Finds how a target runs fastest: draft, draft length, batch size, form and threads."""
