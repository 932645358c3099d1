"""Runnable examples; each module is started with ``python -m examples.<name>``."""
