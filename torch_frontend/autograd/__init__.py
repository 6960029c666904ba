"""Questions that autograd does not answer publicly: the running backward pass, its end, and the leaves of a graph."""
