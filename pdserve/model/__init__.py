"""A transformers model, unmodified, run over a packed batch with paged attention.

``loader`` loads and vets a checkpoint, ``paged_attention`` joins transformers' attention
interface to a batch, ``attention`` has the backends, ``embedded`` finds the model folder.
Nothing here schedules or samples.
"""
