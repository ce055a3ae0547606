"""Headrace: an LLM inference server whose streams are never silent, never stalled, never lost."""

__version__ = "0.1.0"
