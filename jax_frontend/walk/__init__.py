"""The reverse walk over stacked layers: forward, and backward with every layer updated the moment its gradient exists.

`layer_stack` says what a model is, `layer_pass` differentiates one layer, `passes` goes over all of them, `fence` keeps XLA
from copying what is updated in place, `in_state` puts micro-batches into the moments, `release_step` makes the step of it.
"""
