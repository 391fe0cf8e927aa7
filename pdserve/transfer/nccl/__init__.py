"""Payloads by NCCL: GPU to GPU, on one host or between two. Never run on hardware yet.

::

    HELLOs agree ─► PAIR ─► decode makes a unique id ─► PAIRED ─► both: init, polled ─► payloads ─► abort

``library`` is the seam, ``nccl4py`` what is behind it, ``pair`` the life of a communicator,
``payloads`` the two ends of a link.
"""
