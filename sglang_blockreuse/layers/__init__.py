"""Layer plans: which layers scan, rerank or reuse, and what a decode step reads for it."""
