"""What the prefill and the decode worker have in common as programs.

``config`` the settings both have, ``identity`` who this process is, ``requests`` which
session gets a request's messages, ``program`` start, serve, drain and stop. What a
worker does with a request is its own package's.

Threads of a worker, and what each owns::

    event loop      sessions, the request directory
    engine thread   engine, block pool, reservations (commands are posted to it)
    link threads    bytes in flight, nothing else; they post what happened
"""
