"""The demo: the same multi-document prompts on a stock server and on ours, measured side by side.

Read in the order of the walk: documents → prompts → client → measure → compare → report; run.py ties them.
"""
