"""What every wing stands on: the spec, errors, paths, records. Imports nothing above it."""
