"""pdserve: prefill and decode of language models on separate workers.

This package is the shared library. The programs live beside it: ``pdserve_router``
(HTTP front, never imports torch), ``pdserve_prefill`` and ``pdserve_decode``; they
import this package and never each other. Importing ``pdserve`` does nothing.

    errors config sampling timeline clock rpc kvcache.{layout,block_pool,block_table}
        pure: no torch, no asyncio in decisions, no wall clock
    transfer    moves KV between workers; knows layouts, not tensors
    kvcache.storage, model, engine    everything that touches torch
    cli         starts the programs together
"""
