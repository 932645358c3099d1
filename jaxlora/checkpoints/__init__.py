"""Reading model weights."""

from jaxlora.checkpoints.loader import LoadedModel, dummy_model, load_model


__all__ = ["LoadedModel", "dummy_model", "load_model"]
