"""A tiny chat model trained on the spot, so that a laptop run has a target worth speculating for."""
