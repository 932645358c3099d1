"""Models, adapters, parallelism, checkpoints."""

__version__ = "0.1.0"
