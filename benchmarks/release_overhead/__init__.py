"""Host time of plain and released steps beside the peers', Python calls a gradient, JAX's update, and the first step."""
