"""Decides: what should run, what is true, what changes next.

What does not belong here: carrying requests (``dataplane``), bringing one replica up (``replica``).
"""
