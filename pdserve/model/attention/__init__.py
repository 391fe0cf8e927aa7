"""How queries meet the paged KV of their sequences.

``base`` says what a backend gets, ``reference`` is plain torch and right everywhere; faster
backends are tested against it.
"""
