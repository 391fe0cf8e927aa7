"""Runs sequences on one device: plan → execute → apply, one step at a time.

::

    scheduler   pure: what runs next, who waits, who is preempted, whose blocks come back
    batch       a plan as tensors
    runner      executes a plan on the model
    sampler     logits to tokens
    config      numbers that shape an engine (no torch)
    engine      the three beats, and what the worker programs call
    loop        the thread

Knows token ids only: no text, no requests, no links. One counter instead of phases:
``num_computed_tokens`` chases ``num_tokens``; KV that came from elsewhere moves the counter.

Life of a sequence::

    add → WAITING → RUNNING → FINISHED
            ▲─preempt─┘  └─► KEPT → free        (keep_blocks: a prefill worker's, until sent)
    hold → HELD → adopt → RUNNING               (blocks reserved, KV on its way)
    abort ends any of them
"""
