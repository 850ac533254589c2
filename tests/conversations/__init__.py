"""Random conversations with the endpoint, and bookkeeping of their own for every sampled token."""
