"""How an agent and its environment write to each other: one file per dialect."""
