"""Checks and measurements that need a GPU, in seven stages: README.md says what each one decides."""
