"""OpenAI's API as pure functions: bodies to prompts and options of the decoder, and its outputs to answers."""
