"""Programs that run in a sandbox, where this package and the standard library are all there is:
the packages around it are folders without an __init__.py there.
"""
