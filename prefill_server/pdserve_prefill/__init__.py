"""The prefill worker: runs prompts, pushes KV layer by layer, samples the first token.

Life of a request::

    Prefill → waiting → computing (each layer's new KV goes to the outbox as it is written)
            → first token to the router, commit on the link → sealed or aborted by decode
            → blocks free

Blocks stay pinned until the outbox is done with them, whatever the reason. A request
without a hand-off (one token wanted) ends with its token. ``handoffs`` keeps what each
hand-off needs, ``service`` connects sessions, engine and outbox, ``config`` and ``main``
make a program of it. Nothing here imports the router or the decode worker.
"""
