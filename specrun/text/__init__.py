"""Text to token ids and back: tokenizers, chat templates, tools and grammars."""
