"""Benchmarks: one module per name of ``scripts/bench NAME``; ``report`` prints and writes results.

Every ratio is taken inside one run, with the things compared interleaved; figures are
medians over repeats.
"""
