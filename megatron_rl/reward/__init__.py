"""R(x, y): scores responses in worker processes, so that one that hangs or crashes does not harm the run."""
