"""Document-block KV reuse and layer plans for SGLang."""

__version__ = "0.1.0"
