"""How graphs are grown: the layer loop and the two modes."""
