"""Carries requests to replicas.

What does not belong here: deciding which replicas there should be.
"""
