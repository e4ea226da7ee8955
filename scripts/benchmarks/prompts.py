"""Beginnings of texts that the demo pair can go on with."""

from __future__ import annotations

PROMPTS = (
    *("The try statement", "A class definition is", "The import statement", "Exceptions are"),
    *("A function call", "The with statement", "Sequences are", "The return statement"),
)
SENTENCES = (
    *("Names listed in a", "Types affect almost all", "If the list of", "Any remaining exceptions that"),
    *("The following table summarizes", "This repeatedly tests the", "In the context of", "This production can be"),
)
"""Beginnings of paragraphs that the demo pair has learnt, drawn at random. Draft heads are trained on others."""
