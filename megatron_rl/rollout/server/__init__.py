"""SGLang servers: processes, a pool of them, what they report about themselves."""
