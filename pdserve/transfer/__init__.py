"""Moves KV from a prefill worker to a decode worker, and proves that it arrived.

::

    prefill                                              decode
    Outbox ─ a PeerSender per decode process             LandingTable ─ every check of arriving bytes
        push: what is ready, in which segments (pure)        coverage: each cell exactly once (pure)
        stream ═══ frames: 64-byte header, payload ═══► receiver: reads frames, fills views
               ◄══ SEALED, ABORTED ════════════════════

A transport (``shm``, ``tcp``, ``grpc_link``, ``inproc``) is only a byte stream in both directions:
``transports`` knows them by name. What is sent and what is believed is decided here once for
all of them. Knows layouts and bytes; no tensors, no engine.
"""
