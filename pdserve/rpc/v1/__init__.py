"""Generated from ``proto/pdserve/rpc/v1`` by ``scripts/proto``; never edited by hand."""
