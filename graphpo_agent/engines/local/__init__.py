"""The engine of one machine: torch and transformers."""
