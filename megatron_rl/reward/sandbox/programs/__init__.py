"""Programs that run in a sandbox, started by their path: only the standard library is there."""
