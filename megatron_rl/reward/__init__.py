"""R(x, y): scoring responses in worker processes that may hang, crash or lie without harming the run."""
