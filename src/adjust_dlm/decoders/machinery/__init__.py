"""What runs a decoder: the canvas, its rows and columns, the prefix cache, a proposal for every position."""
