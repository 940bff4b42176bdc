"""The fast form of `joint`, `parallel`, `adjust`, `verified`: fixed buffers, captured steps, no waiting in a round."""
