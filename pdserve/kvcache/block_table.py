"""The hash chain that names the content of full blocks. Pure.

A block's hash covers its tokens and all before them, so equal hashes mean an equal prefix.
BLAKE2b with 128 bits: nobody can craft a prompt that reads another's blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b"\0" * 16


def block_hashes(token_ids: Sequence[int], block_size: int, parent: bytes = ROOT) -> list[bytes]:
    """One hash per full block of ``token_ids``, which start right after ``parent``'s block."""
    hashes = []
    for begin in range(0, len(token_ids) - block_size + 1, block_size):
        content = array("I", token_ids[begin : begin + block_size]).tobytes()
        parent = hashlib.blake2b(parent + content, digest_size=16).digest()
        hashes.append(parent)
    return hashes
