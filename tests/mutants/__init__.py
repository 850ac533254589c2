"""Mutation testing: `make mutants` changes the code in one place at a time and looks whether a test
fails.
"""
