"""specrun: engines -> text, by draft-target speculative decoding."""
