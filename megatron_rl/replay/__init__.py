"""Routing replay: the experts of every token in every MoE layer, recorded, replayed and measured
exactly.

Nothing here is global: a ReplayManager owns the override objects that it sets on the routers of one
live model.
"""
