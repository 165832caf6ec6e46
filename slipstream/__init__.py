"""Slipstream: exact speculative decoding, and the lab that proves what it pays."""

__version__ = "0.1.0"
