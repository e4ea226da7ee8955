"""The format that both packages share."""
