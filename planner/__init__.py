"""The memory of a training step: planned without the device it is planned for (`penstock plan`), and measured as it runs."""
