"""The proof by which a router shows a worker that it holds the cluster's secret. Pure."""

from __future__ import annotations

import hashlib
import hmac

PROTOCOL_VERSION = 1
NONCE_BYTES = 32


def session_proof(secret: bytes, *, nonce: bytes, router_id: str) -> bytes:
    """HMAC-SHA256 over the worker's nonce and the router's id."""
    return hmac.new(secret, b"session\0" + nonce + router_id.encode(), hashlib.sha256).digest()


def is_session_proof(proof: bytes, *, secret: bytes, nonce: bytes, router_id: str) -> bool:
    return hmac.compare_digest(proof, session_proof(secret, nonce=nonce, router_id=router_id))
