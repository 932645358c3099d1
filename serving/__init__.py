"""Serving: the engine and its doors, HTTP and `LLM`."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from serving.core import SamplingParams as SamplingParams
    from serving.llm import LLM as LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`from serving import LLM` without importing JAX for those who want only a part."""
    if name == "LLM":
        from serving.llm import LLM

        return LLM
    if name == "SamplingParams":
        from serving.core import SamplingParams

        return SamplingParams
    raise AttributeError(name)
