"""refitd keeps inference engines on the trainer's newest weights."""

__version__ = "0.1.0"
