"""An OpenAI-compatible server. ``engine`` decodes in one thread; ``app`` answers HTTP in another."""
