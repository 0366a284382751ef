"""The steps that build the embedded demo pair (see ``scripts/train_demo.py``)."""
