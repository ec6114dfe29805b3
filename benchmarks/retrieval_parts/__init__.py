"""The parts of ``benchmarks/retrieval.py``."""
