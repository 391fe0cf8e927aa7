"""What the router and the workers say to each other, and how they trust it.

``v1`` is generated from ``proto/`` by ``scripts/proto``. ``convert`` turns wire types into
domain types at the edge, once. ``auth`` and ``ticket`` hold the signatures. ``session`` is
the worker's end of a Session; the router's end lives with the router. Importing
``auth``, ``convert`` or ``ticket`` loads neither torch nor asyncio.

The cluster's secret signs two things:

    session proof   the router answers a worker's nonce: this router may give work
    ticket          the router lets one prefill worker fill one reservation, until a time
"""
