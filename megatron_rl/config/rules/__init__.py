"""Rules between settings, as functions of [rollout] or of all sections; Config calls them.

A rule that needs only a few keys of its section is in the section's class.
"""
