"""``pdserve doctor``: says in plain words what is wrong with a host or a running deployment.

::

    host_facts ─► host_checks ─────────────┐
                                           ├─► findings ─► report, exit status
    deployment_facts ─► deployment_checks ─┤
            probe       payoff ────────────┘

What gathers facts touches the machine and the network and judges nothing. Checks are pure:
facts in, findings out. ``main`` ties them together. To workers it speaks as a router does
(``worker_session``), so a probe goes the way of a request.
"""
