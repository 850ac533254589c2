"""SGLang servers: processes, a pool of them, what they say about themselves."""
