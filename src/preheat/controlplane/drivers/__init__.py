"""Carries out the fleet's actions. What does not belong here: deciding on them (``fleet.py``)."""
