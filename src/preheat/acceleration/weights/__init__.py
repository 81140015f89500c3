"""Brings model files from where they are named to verified, sealed memory.

What does not belong here: engines, and what a replica does with its weights.
"""
