"""The parts of ``benchmarks/calibration.py``."""

import graphpo_agent  # noqa: F401 (before transformers: it hides libraries of other torch builds)
