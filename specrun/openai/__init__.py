"""OpenAI's API as pure functions: its bodies to what the decoder takes, and texts to its answers."""
