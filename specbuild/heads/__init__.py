"""Draft heads: small layers that draft from their target's hidden states.

``checkpoint.py`` reads what others publish. ``fusion.py`` is the target's side, ``eagle3.py`` the head's; both meet in
the features, one cache tensor that both graphs have (see ``specrun.engine_dir.contract``).
"""
