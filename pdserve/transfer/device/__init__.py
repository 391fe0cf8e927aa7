"""Payloads that travel between the memories of two devices, see decision record 7.

::

    prefill   blocks ──gather──► staging ═══ nccl, cuda_ipc ═══► staging ──scatter──► blocks   decode

What both ways have in common is here: the device's memory and queues as plain protocols, waiting
for a device, and the agreement of two processes on a way. No torch: ``kvcache.device`` has that.
"""
