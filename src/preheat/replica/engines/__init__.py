"""Engines: from a spec and the hardware to a LaunchPlan, and the processes in which they run."""
