"""The demo: a small GPT (gpt.py), trained on text that ships with Python (training.py); and the self-test of a machine
with the same model (selftest.py).
"""
