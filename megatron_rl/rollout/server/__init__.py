"""SGLang servers: processes, a pool of them, and checks of what they report about themselves."""
