"""The core: which states are the same and what each step was worth. numpy only."""
