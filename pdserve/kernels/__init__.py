"""CPU kernels, compiled by numba on first use and kept in its cache from then on.

Arrays in, results into arrays that the caller made; no torch, no state, no threads. A kernel
gives each row of its input the same bits whatever rows are beside it, which is what makes the
engine's results independent of batch and chunking: sums run in one fixed order, written out with
explicit vectors (``lanes``) so that the compiler cannot reorder them.

``matmul``       packed weights times a batch of rows
``attention``    queries over paged KV: one kernel for decode and prefill
``elementwise``  norms, rotary embedding, activation, KV write
``pieces``       memory in many pieces: gathered, scattered
``xxh3``         its checksum, alone or while it is copied
"""
