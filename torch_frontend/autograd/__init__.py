"""What autograd does not say by itself: which pass is running, what its graph shows, what reentrant checkpoints hide."""
