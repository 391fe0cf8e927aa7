"""A model on a GPU: transformers' own layers, attention over the paged pool. **Never run on a GPU yet.**

No transforms and no captured graphs: a decode step is bound by the launches of its kernels.
"""

from __future__ import annotations

import logging
from typing import cast

import torch

from pdserve.errors import ConfigError, UnsupportedModel
from pdserve.kvcache.layout import KVLayout, PoolOrder
from pdserve.kvcache.storage import KVStorage
from pdserve.model import selfcheck
from pdserve.model.attention.base import AttentionBackend
from pdserve.model.attention.reference import ReferenceAttention
from pdserve.model.attention.varlen import PagedVarlen, VarlenAttention
from pdserve.model.vet import LoadedModel

logger = logging.getLogger(__name__)

# Of the probe's logits, relative: what another order of additions in the checkpoint's type may change.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 3e-2, torch.bfloat16: 8e-2}
GPU_ORDER = PoolOrder.TOKEN_MAJOR


@torch.inference_mode()
def move(loaded: LoadedModel, device: str, layout: KVLayout) -> bool:
    """Moves the model and checks its logits there; whether torch's paged kernel gives them, too.

    ``layout``: of the pool to come. Raises ``ConfigError`` without such a device, ``UnsupportedModel`` when
    the model computes something else there.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch {torch.__version__} sees no GPU")
    host_layout = loaded.layout(block_size=selfcheck.PROBE_TOKENS, dtype=_name(loaded.model.dtype))
    expected = selfcheck.paged_logits(loaded.model, host_layout, ReferenceAttention).float()
    loaded.model.to(device)  # type: ignore[arg-type]
    tolerance = _TOLERANCE[loaded.model.dtype]
    plain = selfcheck.paged_logits(loaded.model, layout, ReferenceAttention)
    selfcheck.check_equal(plain.float().cpu(), expected, tolerance=tolerance, what=f"the model on {device}")
    try:
        fast = selfcheck.paged_logits(loaded.model, layout, varlen_attention)
        selfcheck.check_equal(fast.float().cpu(), expected, tolerance=tolerance, what="paged attention")
    except (RuntimeError, ValueError, UnsupportedModel) as error:
        logger.warning("slow_attention reason=%s", error)
        return False
    return True


def varlen_attention(storage: KVStorage) -> AttentionBackend:
    from torch.nn.attention.varlen import varlen_attn

    return VarlenAttention(storage, cast(PagedVarlen, varlen_attn))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
