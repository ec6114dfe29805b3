"""Calls to services outside: limits, deadlines, retries, recorded answers. No model, no policy."""
