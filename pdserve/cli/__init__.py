"""``pdserve``: starts a router, prefill workers and decode workers together on one machine.

``main`` chooses the subcommand, ``settings`` and ``plan`` say which programs run with which
flags (pure), ``fleet`` runs them as child processes that end together, ``child`` is the first
code of each, ``up`` ties it all to signals and the terminal. Nothing here serves anything.
"""
