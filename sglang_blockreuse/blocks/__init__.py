"""Document blocks, in the order of a request: request, split, compile, match, plan, load, rows."""
