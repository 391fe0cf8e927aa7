"""The decode worker: grants reservations, receives KV, streams tokens.

Life of a request that is handed off::

    Reserve → granted (blocks held, fence raised, landing expected) → sealed (every cell
    covered once, digest right) → adopted by the engine → tokens → finished

and of one that decode prefills itself: Generate → waiting → tokens → finished. Every other
end (release, lost session, aborted hand-off) goes through draining: blocks come back when
nothing can land in them any more.

``reservations`` decides (pure), ``service`` connects sessions, engine and landing,
``config``, ``run`` and ``main`` make a program of it. Nothing here imports the router or the
prefill worker.
"""
