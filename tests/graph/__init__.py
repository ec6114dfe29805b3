"""Tests of the graph core, against the slow oracle in ``oracle.py``."""
