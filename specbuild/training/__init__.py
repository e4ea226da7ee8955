"""Drafts for one's own target: EAGLE-3 heads and small models, trained on what the target writes.

``rows.py`` makes tokens of conversations, ``losses.py`` compares a draft with its target, and ``loop.py`` trains. Each
kind has a module (``eagle3.py``, ``small_model.py``); both are ``student.Student``s.
"""
