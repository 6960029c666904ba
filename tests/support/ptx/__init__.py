"""A machine that runs PTX on a CPU, warp by warp in a random order, and finds races."""
