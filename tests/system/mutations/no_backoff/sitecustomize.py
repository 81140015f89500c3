"""Starts a killed replica again at once, as one that had served for long, so that many restarts
take no longer than their starts."""

from preheat.controlplane import fleet

fleet.SOUND_S = 0.0
