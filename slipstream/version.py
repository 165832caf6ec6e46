"""The version, alone in a file so that the lab can read it without touching the engine."""

__version__ = "0.1.0"
