"""Whether training with each coding of parameters and states ends at the loss of float32, in both frameworks."""
