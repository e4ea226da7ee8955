"""Beginnings of texts that the demo pair can go on with."""

from __future__ import annotations

PROMPTS = (
    *("The try statement", "A class definition is", "The import statement", "Exceptions are"),
    *("A function call", "The with statement", "Sequences are", "The return statement"),
)
