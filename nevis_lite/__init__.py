"""nevis_lite: lifelong-learning evaluation in a few flat PyTorch modules."""

__version__ = "0.1.0"
