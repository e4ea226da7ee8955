"""Drafts for one's own target: EAGLE-3 heads, Medusa heads and small models, trained on what the target writes.

``rows.py`` makes tokens of conversations, ``losses.py`` compares a draft with its target, and ``loop.py`` trains. Each
kind has a module (``eagle3.py``, ``medusa.py``, ``small_model.py``); all are ``student.Student``s.
"""
