"""Checks of saved rollouts."""
