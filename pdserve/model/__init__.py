"""A transformers model, unmodified, run over a packed batch with paged attention.

``embedded`` finds the model folder, ``gguf_file`` makes one, ``loader`` loads a checkpoint, ``vet``
finds out whether we can serve it, ``fingerprint`` tells two models apart. ``paged_attention`` joins
transformers' attention interface to a batch, ``attention`` has the backends, ``transforms`` make the
model faster. Nothing here schedules or samples.
"""
