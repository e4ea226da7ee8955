"""OpenAI's API as functions."""
