"""Training: of the sampler g (Algorithm 2) and of an adapted base."""
