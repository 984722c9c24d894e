"""Commands of `sglang-blockreuse`, one per file; they import what they need when they run."""
