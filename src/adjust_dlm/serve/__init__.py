"""An HTTP server for diffusion models: requests of many users decoded together, round by round."""
