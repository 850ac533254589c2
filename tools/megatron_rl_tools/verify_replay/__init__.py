"""The proof of routing replay: inputs with known routes, hooks on routers, comparisons, and faults
that are injected on purpose.
"""
