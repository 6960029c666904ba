"""Host time of plain and released steps and of peers, Python calls per gradient, JAX's update, and the first step."""
