"""The KV cache: which block holds what, and where its bytes lie.

``layout``, ``block_pool`` and ``block_table`` are pure: ids and counters. ``storage`` holds
the tensors. Block 0 is never handed out: it is where writes of padding and of sequences
that were aborted in mid-step go.
"""
