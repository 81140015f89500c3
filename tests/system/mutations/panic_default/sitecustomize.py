"""Leaves Envoy's panic threshold at its default."""

from preheat.dataplane.envoy import clusters

clusters.PANIC_THRESHOLD_PERCENT = 50
