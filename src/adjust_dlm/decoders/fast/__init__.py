"""The fast form of `joint`, `parallel` and `adjust`: fixed buffers, captured steps, no waiting inside a round."""
