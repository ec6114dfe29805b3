"""Verifiers: what a finished trajectory is worth."""
