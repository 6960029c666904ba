"""Speed, memory and convergence, measured side by side with peers; results with versions and command in results/."""
