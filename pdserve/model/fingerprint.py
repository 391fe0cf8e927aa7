"""What two workers must have alike to exchange KV, as one number."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLED_BYTES_PER_TENSOR = 4096


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over architecture, tensor names, shapes, types and the first bytes of each tensor."""
    digest = hashlib.sha256()
    config = model.config.get_text_config().to_dict()
    described = {key: value for key, value in config.items() if not key.startswith("_")}
    for irrelevant in ("transformers_version", "torch_dtype", "dtype", "architectures"):
        described.pop(irrelevant, None)
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        head = (
            tensor.detach().flatten()[: SAMPLED_BYTES_PER_TENSOR // tensor.element_size()].cpu().contiguous()
        )
        digest.update(memoryview(head.view(torch.uint8).numpy()))
    return digest.hexdigest()
