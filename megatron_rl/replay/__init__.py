"""Routing replay: which experts each token uses in each MoE layer, recorded, replayed and measured
exactly.

Nothing here is global: a ReplayManager owns the override objects it set on the routers of one live
model.
"""
