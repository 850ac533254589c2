"""Requests to SGLang servers and the answers, checked."""
