"""The spec: what users write, typed, read and checked."""
