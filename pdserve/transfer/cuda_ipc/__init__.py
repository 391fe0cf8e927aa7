"""Payloads between two GPUs of one host (or within one) by a copy into the peer's memory.

Never run on hardware yet.

::

    PAIR ─► decode allocates a staging buffer ─► PAIRED {handle} ─► prefill maps it ─► copies, TAKEN ─► unmap

``memory`` is the seam to CUDA, ``host`` says who is on the same host, ``exports`` keeps decode's
buffers until nobody can write to them any more, ``mappings`` prefill's side of that, ``payloads`` the
two ends of a link.
"""
