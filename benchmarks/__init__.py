"""Measurements that anyone can repeat; each script says how."""

import graphpo_agent as graphpo_agent  # before transformers: it hides what does not fit torch
